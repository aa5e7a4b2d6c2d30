"""Runs on folders of stacks, as jobs and on the command line."""
