"""Targets of training: foreground and distance of objects, boundaries, and affinities."""
