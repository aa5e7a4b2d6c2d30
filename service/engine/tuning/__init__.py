"""Comparison of engine configurations, and the plan files that store the results."""
