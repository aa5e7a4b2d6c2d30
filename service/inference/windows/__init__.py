"""Sliding-window inference and the blending of overlapping scores."""
