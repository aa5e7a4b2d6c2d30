"""Implementation of `stackseg bench`, `tune` and `evaluate`. These modules import torch."""
