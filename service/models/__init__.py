"""Model folders: read their specification, load their networks, and import packages of other formats."""
