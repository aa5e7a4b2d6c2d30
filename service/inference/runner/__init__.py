"""Running one model on one device: engine selection, request planning and score computation."""
