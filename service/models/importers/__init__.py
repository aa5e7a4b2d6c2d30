"""Models from elsewhere: each module reads one kind of package into a Draft, which `model_folder` makes a model folder of."""
