"""Devices: their queues, threads and loaded models."""
