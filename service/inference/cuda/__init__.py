"""Inference code for CUDA devices: image uploads, watershed and placement in device memory."""
