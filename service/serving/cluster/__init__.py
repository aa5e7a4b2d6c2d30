"""Devices of other hosts: actors of a Ray cluster, fed by files on storage that all hosts mount."""
