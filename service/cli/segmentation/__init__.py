"""`stackseg segment`: one stack, a folder, or an image block by block."""
