"""Our own engine for CPUs: Winograd convolutions, norms and shuffles in C++, and a forward captured as one call."""
