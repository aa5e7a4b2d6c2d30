"""Recipes of the bundled models: synthetic stacks, and the commands that train and score on them."""
