"""Ground floor: errors, settings, the nouns, hardware, memory, compiled C++, log."""
