"""Convert packages of other formats to model folders. Each module reads one kind of package for `import_model`."""
