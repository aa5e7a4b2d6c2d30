"""Block-wise segmentation of volumes of any size by workers that share a folder."""
