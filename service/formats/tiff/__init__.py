"""TIFF: OME, ImageJ and plain."""
