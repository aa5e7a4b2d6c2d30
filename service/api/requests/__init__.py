"""Requests with a stack: admission, the body, jobs, and what is sent back."""
