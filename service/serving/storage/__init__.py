"""Files and folders on disk, and limits on disk space and memory."""
