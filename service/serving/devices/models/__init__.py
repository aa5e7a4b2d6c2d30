"""Loaded models of a device: loading, caching and eviction."""
