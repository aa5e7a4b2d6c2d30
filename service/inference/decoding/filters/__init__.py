"""Filters of height maps and labels that decoders apply."""
