"""Network architectures that a model file can specify."""
