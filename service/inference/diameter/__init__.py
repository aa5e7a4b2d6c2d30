"""Estimates of the object diameter, and confidence in results."""
