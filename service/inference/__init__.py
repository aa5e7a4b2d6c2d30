"""Inference with one model on one device, from a volume to a segmentation. Queues and HTTP are handled elsewhere."""
