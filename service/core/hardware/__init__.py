"""The processor, GPUs and memory of this host, and what torch can do with them."""
