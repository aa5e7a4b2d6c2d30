"""Preparation of the network's input: normalization, resampling, and detection of empty windows."""
