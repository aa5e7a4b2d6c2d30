"""Devices on this host."""
