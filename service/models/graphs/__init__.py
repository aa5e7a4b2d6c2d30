"""Exported programs as modules of operators that are allowed."""
