"""Sliding windows over an image, and their scores blended into slabs of planes."""
