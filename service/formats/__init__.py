"""Image file formats: modules that read a file into a `Volume`, or write a segmentation to a file."""
