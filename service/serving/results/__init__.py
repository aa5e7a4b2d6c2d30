"""What a request gets: labels, tables and archives, with their origin."""
