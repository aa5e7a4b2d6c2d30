"""Messages of the HTTP API: headers, problem documents, results, and the JSON schemas of each resource."""
