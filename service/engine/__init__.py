"""Inference engines. Each engine turns a PyTorch module into a fast `Network` for one fixed input shape."""
