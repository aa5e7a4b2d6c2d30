"""Files in the formats of microscope vendors, read with one library per format."""
