"""What every other package builds on: errors, settings, nouns, hardware, memory, compiled C++, log."""
