"""Measurements of `stackseg bench`, `tune` and `evaluate`, which import torch."""
