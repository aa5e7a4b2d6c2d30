"""Results of requests: labels, tables and archives, with their provenance."""
