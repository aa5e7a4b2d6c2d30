"""Implementation of `stackseg segment` for a single stack, a folder, or an image block by block."""
