"""Convert packages in other formats to model folders. `import_model` chooses the module that reads a format."""
