"""Engines: each module turns a torch module into a fast Network for one fixed shape."""
