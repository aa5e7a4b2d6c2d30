"""Inference code for CUDA devices: image uploads and placement in device memory."""
