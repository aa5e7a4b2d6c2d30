"""Reading files of unknown origin in confined child processes."""
