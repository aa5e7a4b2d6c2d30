"""Selection of the highest-contrast windows of an image."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from service.core.quantities import Size
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image

# Maximum number of candidate window centers: along z, and along each of y and x.
MAX_CANDIDATE_PLANES = 8
MAX_CENTERS_PER_AXIS = 16

# Candidate centers are ranked in planes whose pixels are averages of this many pixels along y and x.
PLANE_REDUCTION = 2

# Maximum width of the structures that contribute to the contrast, relative to the width of a window. The edge of a
# sample often has a higher contrast than the objects, but it does not show their diameter.
MAX_RELATIVE_WIDTH = 2

# Maximum number of windows that `select_high_contrast_windows` returns.
MAX_WINDOWS = 4

Box = tuple[slice, slice, slice]
"""Slices along (z, y, x) that select a part of an image."""


def rank_by_contrast(image: Image, window_size: Size) -> list[Size]:
    """Return candidate window centers (z, y, x) in descending order of contrast.

    The contrast at a center is the standard deviation of the voxels in its z plane, within a window of size
    `window_size`, after structures that are wider than `MAX_RELATIVE_WIDTH` windows have been subtracted.
    """
    depth, height, width = image.shape[2:]
    rows, columns = (
        _place_centers(height, window_size[1], MAX_CENTERS_PER_AXIS),
        _place_centers(width, window_size[2], MAX_CENTERS_PER_AXIS),
    )
    candidates = list[tuple[float, Size]]()
    half_height, half_width = (max(length // (2 * PLANE_REDUCTION), 1) for length in window_size[1:])
    for z in _place_centers(depth, window_size[0] // 2, MAX_CANDIDATE_PLANES):
        plane = _isolate_bright_structures(
            image[0, slice(None), slice(z, z + 1), slice(0, height), slice(0, width)][:, 0], window_size
        )
        for center in itertools.product(rows, columns):
            y, x = (position // PLANE_REDUCTION for position in center)
            patch = plane[:, max(y - half_height, 0) : y + half_height, max(x - half_width, 0) : x + half_width]
            candidates.append((-float(patch.std(correction=0)), (z, *center)))
    return [center for _, center in sorted(candidates)]


def _isolate_bright_structures(plane: Tensor, window_size: Size) -> Tensor:
    """Return a plane [C, y, x] at reduced resolution without structures that are wider than about two windows.

    The background, which is subtracted, is the morphological opening (white top-hat; Serra 1982). It keeps straight
    edges of large structures, unlike a blurred image.
    """
    reduced = functional.avg_pool2d(plane.clamp(0, 1), PLANE_REDUCTION, ceil_mode=True, count_include_pad=False)
    radii = [MAX_RELATIVE_WIDTH * length // (2 * PLANE_REDUCTION) for length in window_size[1:]]
    # The plane continues beyond its borders, so edges are also straight there.
    padding = [2 * radius for radius in reversed(radii) for _ in range(2)]
    eroded = -_compute_running_maximum(-functional.pad(reduced, padding, "replicate"), radii)
    return reduced - _compute_running_maximum(eroded, radii)


def _compute_running_maximum(plane: Tensor, radii: Sequence[int]) -> Tensor:
    """Return the maxima in all rectangles of 2 * `radii` + 1 pixels that lie within a plane [C, y, x]."""
    for axis, radius in enumerate(radii, start=1):
        # The maximum of two overlapping segments is the maximum of their union, so a few steps cover any width.
        covered = 1
        while covered <= 2 * radius:
            shift = min(covered, 2 * radius + 1 - covered)
            length = plane.shape[axis] - shift
            plane = torch.maximum(plane.narrow(axis, 0, length), plane.narrow(axis, shift, length))
            covered += shift
    return plane


def select_high_contrast_windows(image: Image, roi: Size) -> list[Tensor]:
    """Return the highest-contrast windows [C, z, y, x] of at most `roi` voxels, at the original resolution."""
    size = as_size(image.shape[2:])
    window_size = [min(roi_length, length) for roi_length, length in zip(roi, size, strict=True)]
    return cut_boxes(
        image,
        select_spaced_boxes(
            (make_box_around(center, size, window_size, size) for center in rank_by_contrast(image, roi)), MAX_WINDOWS
        ),
    )


def _place_centers(length: int, window_length: int, max_count: int) -> list[int]:
    """Return the centers of up to `max_count` equal parts of an axis, about half of `window_length` apart."""
    count = min(max(round(2 * length / max(window_length, 1)), 1), max_count)
    return [int((index + 0.5) * length / count) for index in range(count)]


def cut_boxes(image: Image, boxes: Sequence[Box]) -> list[Tensor]:
    """Return parts of the image, float32 [C, z, y, x]. Each plane is read only once and not retained."""
    parts = [torch.empty((image.shape[1], *(part.stop - part.start for part in box))) for box in boxes]
    for z in sorted(set(itertools.chain.from_iterable(range(box[0].start, box[0].stop) for box in boxes))):
        for part, (planes, rows, columns) in zip(parts, boxes, strict=True):
            if planes.start <= z < planes.stop:
                part[:, z - planes.start] = image[0, slice(None), slice(z, z + 1), rows, columns][:, 0]
    return parts


def make_box_around(center: Size, size: Size, inner_size: Sequence[int], scaled_size: Sequence[int]) -> Box:
    """Return a box around `center` for an image of size `size`.

    After the image has been resized to `scaled_size`, the box has the size `inner_size`.
    """
    spans = []
    for position, length, inner_length, scaled_length in zip(center, size, inner_size, scaled_size, strict=True):
        extent = min(max(round(inner_length * length / scaled_length), 1), length)
        start = min(max(position - extent // 2, 0), length - extent)
        spans.append(slice(start, start + extent))
    return spans[0], spans[1], spans[2]


def select_spaced_boxes(candidates: Iterable[Box], max_count: int) -> list[Box]:
    """Return the first boxes, up to `max_count`, that are spaced apart from all previously selected boxes."""
    boxes = list[Box]()
    for box in candidates:
        if len(boxes) < max_count and all(_are_spaced(box, other) for other in boxes):
            boxes.append(box)
    return boxes


def _are_spaced(box: Box, other_box: Box) -> bool:
    """Return whether the centers of two boxes are at least half the length of a box apart along some axis."""
    return any(
        abs(span.start - other_span.start) * 2 >= span.stop - span.start
        for span, other_span in zip(box, other_box, strict=True)
    )
