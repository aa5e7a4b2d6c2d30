"""Annotated stacks, and trainings of models on them."""
