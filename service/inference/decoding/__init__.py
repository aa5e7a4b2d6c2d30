"""Slabs of scores -> labels, classes or probabilities on the grid of the volume."""
