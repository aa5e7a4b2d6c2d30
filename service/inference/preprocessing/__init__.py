"""From stored pixels to the image that windows are cut from."""
