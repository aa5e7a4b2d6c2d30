"""Packages from elsewhere -> model folder: one module per kind of package, which `model_folder` puts to use."""
