"""HTTP layer below the routes: listener, protocol, multipart forms and uploads."""
