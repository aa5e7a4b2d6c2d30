"""Files bundled with the package, atomic writes, and zip archives."""
