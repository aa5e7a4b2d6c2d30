"""Reading untrusted files in confined child processes."""
