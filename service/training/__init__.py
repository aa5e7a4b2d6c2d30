"""Training of a model on annotated stacks, and its evaluation."""
