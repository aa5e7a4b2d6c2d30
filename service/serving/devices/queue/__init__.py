"""Jobs of a device: their order, the threads that run them, and how long they take."""
