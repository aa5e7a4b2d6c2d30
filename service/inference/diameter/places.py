"""Places of an image where there is most to be seen, and windows around them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from service.core.quantities import Size
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image

# Planes that windows are chosen from, and places along y and x.
PLANES, PLACES = 8, 16
# Most windows of an image at its original resolution.
MAX_WINDOWS = 4

Box = tuple[slice, slice, slice]
"""Voxels of a part of an image along (z, y, x)."""


def signals(image: Image, edges: Size) -> list[Size]:
    """Return places (z, y, x) with signal around them in their plane, the strongest first, within `edges`."""
    depth, height, width = image.shape[2:]
    rows, columns = _middles(height, edges[1], PLACES), _middles(width, edges[2], PLACES)
    candidates = list[tuple[float, Size]]()
    up, left = edges[1] // 2, edges[2] // 2
    for z in _middles(depth, edges[0] // 2, PLANES):
        plane = image[0, slice(None), slice(z, z + 1), slice(0, height), slice(0, width)].clamp(0, 1)
        for y, x in itertools.product(rows, columns):
            part = plane[:, :, max(y - up, 0) : y + up, max(x - left, 0) : x + left]
            candidates.append((-float(part.std(correction=0)), (z, y, x)))
    return [place for _, place in sorted(candidates)]


def strongest_windows(image: Image, roi: Size) -> list[Tensor]:
    """Return windows [C, z, y, x] of an image, up to `roi` large and as it is sampled, where most is to be seen."""
    size = as_size(image.shape[2:])
    inner = [min(edge, length) for edge, length in zip(roi, size, strict=True)]
    return cut_boxes(
        image, choose_apart((box_around(place, size, inner, size) for place in signals(image, roi)), MAX_WINDOWS)
    )


def _middles(length: int, edge: int, most: int) -> list[int]:
    count = min(max(round(2 * length / max(edge, 1)), 1), most)
    return [int((index + 0.5) * length / count) for index in range(count)]


def cut_boxes(image: Image, boxes: Sequence[Box]) -> list[Tensor]:
    """Return parts of the image, float32 [C, z, y, x]; every plane is read once, and none stays."""
    parts = [torch.empty((image.shape[1], *(part.stop - part.start for part in box))) for box in boxes]
    for z in sorted(set(itertools.chain.from_iterable(range(box[0].start, box[0].stop) for box in boxes))):
        for part, (planes, rows, columns) in zip(parts, boxes, strict=True):
            if planes.start <= z < planes.stop:
                part[:, z - planes.start] = image[0, slice(None), slice(z, z + 1), rows, columns][:, 0]
    return parts


def box_around(place: Size, size: Size, inner: Sequence[int], scaled: Sequence[int]) -> Box:
    """Return the voxels of an image of `size` around `place` that become `inner` voxels of a grid of `scaled`."""
    parts = []
    for middle, length, edge, whole in zip(place, size, inner, scaled, strict=True):
        taken = min(max(round(edge * length / whole), 1), length)
        start = min(max(middle - taken // 2, 0), length - taken)
        parts.append(slice(start, start + taken))
    return parts[0], parts[1], parts[2]


def choose_apart(candidates: Iterable[Box], most: int) -> list[Box]:
    """Return up to `most` boxes, each apart from those chosen before it."""
    boxes = list[Box]()
    for box in candidates:
        if len(boxes) < most and all(_apart(box, other) for other in boxes):
            boxes.append(box)
    return boxes


def _apart(one: Box, other: Box) -> bool:
    """Return whether two boxes of one size have at most half of their edge in common along some axis."""
    return any(abs(a.start - b.start) * 2 >= a.stop - a.start for a, b in zip(one, other, strict=True))
