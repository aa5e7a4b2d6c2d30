"""What requests and answers say: headers, problem documents, results, and the JSON of each resource."""
