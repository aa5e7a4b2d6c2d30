"""Inference code that runs on CUDA devices only."""
