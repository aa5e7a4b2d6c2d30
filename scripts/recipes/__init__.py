"""Recipes for the bundled models: generators of synthetic stacks, and commands for training and scoring."""
