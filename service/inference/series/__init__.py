"""Segmentation of time series, and linking of objects across time points."""
