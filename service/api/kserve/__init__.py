"""Open Inference Protocol, version 2 (KServe, Triton): the segmentation of a tensor as a format of `POST /segment`."""
