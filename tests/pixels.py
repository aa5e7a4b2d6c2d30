"""Pixels of every supported dtype, overlaps of objects, and variants of a model's input specification."""

import numpy as np

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"] + [
    f"float{bits}" for bits in (16, 32, 64)
]


def replace_input(bands, **changes):
    """Return a copy of a model spec with these fields of `input` replaced."""
    return bands.model_copy(update={"input": bands.input.model_copy(update=changes)})


def make_pixels(dtype, shape=(3, 7, 11)):
    """Return random pixels of any dtype: booleans, or values from 0 to 120."""
    pixels = np.random.default_rng(0).uniform(0, 120, shape)
    return pixels > 60 if dtype == "bool" else pixels.astype(dtype)


def noise(*shape, dtype="uint16", seed=None):
    """Return random pixels: normal floats, or integers from 0 to 119. The default seed is the number of axes."""
    rng = np.random.default_rng(len(shape) if seed is None else seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 120, shape).astype(dtype)


def compute_overlaps(labels, expected):
    """Return, for each expected object, its intersection over union with the object that covers most of it."""
    overlaps = []
    for number in range(1, int(expected.max()) + 1):
        mask = expected == number
        best = np.bincount(labels[mask], minlength=2)[1:].argmax() + 1
        overlaps.append((mask & (labels == best)).sum() / (mask | (labels == best)).sum())
    return overlaps
