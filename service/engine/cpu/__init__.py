"""StackSeg's own CPU engine: C++ kernels for convolutions, norms and shuffles, and graph capture of a forward pass."""
