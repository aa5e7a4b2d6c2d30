"""Sliding windows over an image, and the blending of their scores into slabs of planes."""
