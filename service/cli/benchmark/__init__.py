"""Measurements of `stackseg bench`."""
