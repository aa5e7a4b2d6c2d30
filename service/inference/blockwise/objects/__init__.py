"""Objects of a block-wise run: the pieces of its tiles are merged into objects, and holes are filled."""
