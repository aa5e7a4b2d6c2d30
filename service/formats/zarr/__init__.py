"""Reading and writing OME-Zarr."""
