"""Engine code that runs only on CUDA devices."""
