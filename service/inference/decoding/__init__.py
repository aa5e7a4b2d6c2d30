"""Decoders that convert slabs of scores to labels, classes or probabilities on the grid of the volume."""
