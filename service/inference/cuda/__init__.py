"""Inference code for CUDA devices."""
