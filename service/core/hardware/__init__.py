"""The processor, GPUs and memory of this host, and the capabilities of torch devices."""
