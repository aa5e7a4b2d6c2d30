"""Detect planes that a file lacks, and find the part of the stack that is complete.

Acquisitions that are stopped early leave files whose metadata declares more planes than there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.core.errors import BadFile
from service.core.types import Array


def make_incomplete_error(container: str, expected_count: int, stored_count: int) -> BadFile:
    """Return the error for a file that has fewer planes than its metadata declares."""
    return BadFile(
        f"The metadata ({container}) declares {expected_count} planes, but the file has {stored_count}. The acquisition"
        " was stopped early, or the file is truncated or is one of several files. Export the whole image as one file,"
        " or set allow_incomplete=true to use the planes that are present.",
        parameter="allow_incomplete",
        suggested={"allow_incomplete": "true"},
    )


def make_incomplete_note(container: str, expected_count: int, stored_count: int, used_count: int) -> str:
    """Return the note for an incomplete file that is read because of `allow_incomplete`."""
    used = "They" if used_count == stored_count else f"{used_count} of them, which form a complete stack,"
    return (
        f"The metadata ({container}) declares {expected_count} planes, but the file has {stored_count}. {used} are used"
        " because of allow_incomplete=true."
    )


def crop_to_complete(axes: str, shape: Sequence[int], positions: Array) -> tuple[int, ...]:
    """Return the lengths of the leading part of a stack that has no missing planes, or zeros if there is none.

    Complete time points are retained. If there are none, the first one is cropped along z or the channels, whichever
    retains more planes.

    axes, shape  axes of the declared planes, and their lengths
    positions    positions [n, axes] of the planes that are present, without duplicates
    """
    lengths = list(shape)
    remaining = sorted(range(len(shape)), key=lambda index: axes[index] in "ZC")
    while remaining:
        # Other axes than z and channels are cropped first.
        candidates = [index for index in remaining if axes[index] in "ZC"]
        candidates = candidates if len(candidates) == len(remaining) else remaining[:1]
        complete = {index: _count_complete_entries(shape, positions, remaining, index) for index in candidates}
        best = max(candidates, key=lambda index: complete[index] / shape[index])
        if complete[best]:
            lengths[best] = complete[best]
            return tuple(lengths)
        lengths[remaining[0]] = 1
        positions = positions[positions[:, remaining[0]] == 0]
        remaining = remaining[1:]
    return tuple(lengths) if len(positions) else (0,) * len(shape)


def _count_complete_entries(shape: Sequence[int], positions: Array, axes: Sequence[int], axis: int) -> int:
    """Return the number of leading entries along an axis that have all planes along the other axes."""
    entries, counts = np.unique(positions[:, axis], return_counts=True)
    complete = entries[counts == math.prod(shape[index] for index in axes if index != axis)]
    return int(np.logical_and.accumulate(complete == np.arange(len(complete))).sum())
