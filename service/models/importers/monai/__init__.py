"""Import of MONAI bundles."""
