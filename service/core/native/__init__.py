"""The C++ library: build variants and loading."""
