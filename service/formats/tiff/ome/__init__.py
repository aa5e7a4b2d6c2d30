"""OME-XML in OME-TIFF files."""
