"""Windows of several requests in one batch."""
