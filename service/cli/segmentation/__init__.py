"""Implementation of `stackseg segment` for a single stack, a folder, or an image that is processed block by block."""
