"""Decoding of flows, along which voxels move to the center of their object, as in Cellpose."""
