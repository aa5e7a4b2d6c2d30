"""Packages from elsewhere -> model folder: one module per kind of package, which `import_model` puts to use."""
