"""Devices on other hosts, which run in actors of a Ray cluster."""
