"""Asynchronous jobs, which run independently of the client's connection."""
