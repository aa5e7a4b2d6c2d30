"""Access control: API keys, rate limits, trusted host names, CORS, and protection against cross-site requests."""
