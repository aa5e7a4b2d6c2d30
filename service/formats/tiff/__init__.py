"""Reading and writing TIFF: OME-TIFF, ImageJ, plain pages, and the TIFF variants of microscope vendors."""
