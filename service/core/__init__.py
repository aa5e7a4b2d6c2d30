"""Foundation: errors, settings, shared types, hardware, memory, the C++ library and logging."""
