"""Tools for AI agents (Model Context Protocol): descriptions, arguments, and calls on behalf of a client."""
