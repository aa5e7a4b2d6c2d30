"""Jobs that outlive a connection."""
