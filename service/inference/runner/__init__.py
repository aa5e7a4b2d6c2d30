"""One model on one device: the engine that is selected for it, its scores, and what requests to it take."""
