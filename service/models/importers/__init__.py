"""Models from elsewhere: each module reads a kind of package into a Draft, and `model_folder` writes a model folder."""
