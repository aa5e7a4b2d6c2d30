"""The training loop: setup, optimizer steps, and validation by objects."""
