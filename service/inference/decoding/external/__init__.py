"""Decoders that use the libraries of other segmentation programs. They are imported when a model needs them."""
