"""Requests wait, run and are kept: queue, devices, loaded models, jobs on disk."""
