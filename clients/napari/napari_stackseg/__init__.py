"""napari plugin that segments stacks, and trains models, on a StackSeg server."""
