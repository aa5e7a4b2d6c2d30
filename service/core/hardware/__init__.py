"""The processor, GPUs and memory of the host, and the capabilities of torch devices."""
