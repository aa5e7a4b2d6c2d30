"""Sections of the settings: what computes, and what serves."""
