"""The planes of a TIFF: pages that belong to one stack, their order, and missing planes."""
