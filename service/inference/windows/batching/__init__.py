"""Batching of windows from several requests on one device."""
