"""API keys, rate limits, and the hosts and pages that may use the service."""
