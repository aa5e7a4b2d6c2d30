"""Devices with their queues, threads and loaded models."""
