"""Annotated stacks and trainings."""
