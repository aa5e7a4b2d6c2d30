"""Code that runs on CUDA devices only."""
