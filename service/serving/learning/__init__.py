"""Annotated stacks, and training of models on them."""
