"""Projects: results, annotated stacks and models of one experiment."""
