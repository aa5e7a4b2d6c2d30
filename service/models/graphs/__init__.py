"""Convert exported programs to torch modules that call only allowed operators."""
