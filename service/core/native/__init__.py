"""The C++ library: its build variants, and how it is loaded."""
