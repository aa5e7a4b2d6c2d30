"""Model folder -> spec and torch module; packages from elsewhere -> model folder."""
