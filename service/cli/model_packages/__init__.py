"""Import models from files and URLs, and export them."""
