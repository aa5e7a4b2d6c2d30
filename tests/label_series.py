"""Label series for tests of tracking."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.uint16]


def make_box_series(*times: list[tuple[int, int]]) -> Labels:
    """Return labels [T, 2, 4, 60]. Each pair of a time point is the x range of one box; boxes are numbered from 1."""
    labels = np.zeros((len(times), 2, 4, 60), np.uint16)
    for time, spans in enumerate(times):
        for number, (start, stop) in enumerate(spans, 1):
            labels[time, :, :, start:stop] = number
    return labels
