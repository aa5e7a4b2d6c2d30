"""Sections of the settings: computation, and the service."""
