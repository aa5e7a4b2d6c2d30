"""One model on one device: a volume in, a segmentation out, without a queue and without HTTP."""
