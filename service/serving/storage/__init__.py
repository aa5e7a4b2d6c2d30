"""Files and folders on disk, and their limits."""
