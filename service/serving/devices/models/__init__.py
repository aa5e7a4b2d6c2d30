"""Models as they are loaded on a device, and the memory that they take."""
