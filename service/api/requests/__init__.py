"""Steps shared by the routes that accept a stack: admission, receiving the body, jobs, and sending results."""
