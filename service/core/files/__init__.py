"""Access to bundled files, atomic writes, and zip archives."""
