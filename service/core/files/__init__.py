"""Files of the package, files that are written whole, and zip archives."""
