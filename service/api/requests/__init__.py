"""Steps shared by routes that accept a stack: admission, receiving the body, accepting jobs, and building responses."""
