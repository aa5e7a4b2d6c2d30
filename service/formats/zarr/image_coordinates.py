"""Read the coordinate system of an OME-Zarr image for labels that are stored in it.

By the specification, labels have as many resolutions as their image, and lie in its coordinate system. Requires the
`zarr` extra.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr

from service.core.types import Segmentation

Steps = tuple[int, int, int]

_METADATA_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
_Z_AXIS = {"name": "z", "type": "space"}
# Maximum relative difference between the scale of a resolution and the one that follows from its shape.
_SCALE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class ImageCoordinates:
    """Coordinate system of an image, restricted to the axes of its labels.

    axes             metadata of each axis
    steps            distance between neighboring voxels along z, y, x in each resolution, in voxels of the finest one
    transformations  coordinate transformations of each resolution
    common           coordinate transformations of all resolutions
    """

    axes: list[dict[str, Any]]
    steps: list[Steps]
    transformations: list[list[dict[str, Any]]]
    common: list[dict[str, Any]]


def read(image: Path, segmentation: Segmentation) -> ImageCoordinates | None:
    """Read the coordinate system of an image.

    Return None if its metadata is incomplete, or if the segmentation has another size or other axes than the image.
    """
    try:
        return _read(zarr.open_group(image, mode="r"), segmentation)
    except _METADATA_ERRORS:
        return None


def _read(group: Any, segmentation: Segmentation) -> ImageCoordinates | None:
    multiscale = group.attrs.get("ome", group.attrs)["multiscales"][0]
    letters = "".join(_get_letter(axis) for axis in multiscale["axes"])
    positions = [letters.find(axis) for axis in segmentation.axes]
    # As in `service.formats.zarr.image`, the resolutions may be in any order.
    datasets = sorted(multiscale["datasets"], key=lambda dataset: -math.prod(group[dataset["path"]].shape))
    shapes = list(_read_shapes(group, datasets, positions[-3:]))
    # An image without z is segmented as a stack with one plane.
    missing_axes = {axis for axis, position in zip(segmentation.axes, positions, strict=True) if position < 0}
    if missing_axes - {"Z"} or shapes[0] != list(segmentation.pixels.shape[-3:]):
        return None
    steps = list(_find_steps(shapes))
    return ImageCoordinates(
        axes=[dict(multiscale["axes"][position]) if position >= 0 else dict(_Z_AXIS) for position in positions],
        steps=steps,
        transformations=_read_transformations(datasets, positions, steps),
        common=_select_axes(multiscale.get("coordinateTransformations") or [], positions),
    )


def _read_shapes(group: Any, datasets: Sequence[dict[str, Any]], positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield the lengths of each resolution along axes at some positions. Missing axes have the position -1."""
    for dataset in datasets:
        shape = group[dataset["path"]].shape
        yield [1 if position < 0 else shape[position] for position in positions]


def _read_transformations(
    datasets: Sequence[dict[str, Any]], positions: Sequence[int], steps: Sequence[Steps]
) -> list[list[dict[str, Any]]]:
    """Return the transformations of each resolution."""
    transformations = [_select_axes(dataset["coordinateTransformations"], positions) for dataset in datasets]
    return [_check_scale(transformations[0], level, step) for level, step in zip(transformations, steps, strict=True)]


def _get_letter(axis: dict[str, Any]) -> str:
    kinds = {"time": "T", "channel": "C"}
    return kinds.get(axis.get("type", ""), axis["name"].upper() if len(axis["name"]) == 1 else "?")


def _find_steps(shapes: Sequence[Sequence[int]]) -> Iterator[Steps]:
    """Yield the steps of each resolution. They are multiples of the steps of the previous resolution."""
    steps = [1, 1, 1]
    for shape in shapes:
        steps = [
            step * max(1, round(full / length / step))
            for step, full, length in zip(steps, shapes[0], shape, strict=True)
        ]
        z, y, x = steps
        yield z, y, x


def _select_axes(transformations: Sequence[dict[str, Any]], positions: Sequence[int]) -> list[dict[str, Any]]:
    """Return transformations of the axes at some positions. Missing axes have the position -1.

    Raises KeyError for transformations that refer to files.
    """
    neutral_values = {"scale": 1.0, "translation": 0.0}
    return [
        {
            "type": kind,
            kind: [
                float(transformation[kind][position]) if position >= 0 else neutral_values[kind]
                for position in positions
            ],
        }
        for transformation in transformations
        if (kind := transformation["type"]) != "identity"
    ]


def _check_scale(
    finest: list[dict[str, Any]], level: list[dict[str, Any]], steps: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the transformations of a resolution or, if they do not match its steps, the scaled ones of the finest."""
    finest_scale, scale = (_find_scale(transformations) for transformations in (finest, level))
    factors = [1] * (len(scale) - len(steps)) + list(steps)
    expected_scale = [size * factor for size, factor in zip(finest_scale, factors, strict=True)]
    if all(map(lambda a, b: math.isclose(a, b, rel_tol=_SCALE_TOLERANCE), scale, expected_scale)):
        return level
    return [
        {"type": "scale", "scale": expected_scale} if transformation["type"] == "scale" else transformation
        for transformation in finest
    ]


def _find_scale(transformations: list[dict[str, Any]]) -> list[float]:
    (scale,) = (transformation["scale"] for transformation in transformations if transformation["type"] == "scale")
    return list(scale)
