"""Training of models on annotated stacks, and evaluation of models."""
