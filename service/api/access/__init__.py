"""Access control: API keys, rate limits, trusted host names and CORS."""
