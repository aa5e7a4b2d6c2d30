"""Image file formats: each module turns a file into a Volume, or a segmentation into a file."""
