"""Convert packages in other formats to model folders. Each module reads one format for `import_model`."""
