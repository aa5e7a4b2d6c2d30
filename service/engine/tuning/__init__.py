"""Races between engines, and the plans that keep their results."""
