"""HTTP below the routes: the protocol, the listener, forms and uploads."""
