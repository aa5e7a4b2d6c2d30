"""Devices of other hosts, through Ray."""
