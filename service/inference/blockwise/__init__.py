"""Segmentation of volumes of any size, block by block, by workers that share a folder."""
