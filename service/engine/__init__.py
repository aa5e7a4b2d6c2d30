"""Inference engines. Each one turns a torch module into a fast `Network` for one fixed input shape."""
