"""Messages of the HTTP API: headers, problem documents, results, and JSON schemas of all resources."""
