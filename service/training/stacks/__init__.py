"""Annotated stacks: reading, resampling, held-out parts and training examples."""
