"""OME attributes of a segmentation: axes, transformations, and the names and colors of classes.

Specification: https://ngff.openmicroscopy.org.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from service.core.types import Segmentation
from service.formats.tiff.imagej_metadata import make_label_colors
from service.formats.zarr.image_coordinates import ImageCoordinates

OME_VERSIONS = {2: "0.4", 3: "0.5"}
_TIME_UNITS = {
    "s": "second", "ms": "millisecond", "µs": "microsecond", "ns": "nanosecond", "min": "minute", "h": "hour",
    "d": "day",
}  # fmt: skip
_AXIS_TYPES = {"T": "time", "C": "channel"}


def copy_coordinates(image: ImageCoordinates) -> dict[str, Any]:
    """Return the axes and the transformations of an image for its labels."""
    datasets = [
        {"path": str(level_number), "coordinateTransformations": transformations}
        for level_number, transformations in enumerate(image.transformations)
    ]
    common = {"coordinateTransformations": image.common} if image.common else {}
    return {"axes": image.axes, "datasets": datasets} | common


def describe_coordinates(segmentation: Segmentation, steps: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Return the axes and the transformations of resolutions with these steps for the voxel size of a segmentation."""
    datasets = []
    for level_number, level_steps in enumerate(steps):
        voxel_size = tuple(segmentation.voxel_size or (1, 1, 1))
        scale = dict(zip("ZYX", np.multiply(level_steps, voxel_size).tolist(), strict=True))
        if segmentation.time_interval is not None:
            scale["T"] = segmentation.time_interval.length
        factors = [float(scale.get(axis, 1)) for axis in segmentation.axes]
        transformations = [{"type": "scale", "scale": factors}]
        datasets.append({"path": str(level_number), "coordinateTransformations": transformations})
    return {"axes": _describe_axes(segmentation), "datasets": datasets}


def make_ome_attributes(
    segmentation: Segmentation, multiscales: dict[str, Any], zarr_format: int, *, is_in_image: bool
) -> dict[str, Any]:
    """Return the OME attributes of the group."""
    version_attribute = {"version": OME_VERSIONS[zarr_format]}
    ome: dict[str, Any] = {"multiscales": [multiscales | (version_attribute if zarr_format == 2 else {})]}
    if segmentation.kind == "probabilities":
        ome["omero"] = {"channels": [_describe_channel(label) for label in segmentation.names]}
    else:
        ome["image-label"] = (version_attribute if zarr_format == 2 else {}) | (
            {"source": {"image": "../../"}} if is_in_image else {}
        )
        if segmentation.names:
            ome["image-label"]["properties"] = [
                {"label-value": value, "name": class_name} for value, class_name in enumerate(segmentation.names)
            ]
            ome["image-label"]["colors"] = [
                {"label-value": value, "rgba": _get_color(value)} for value in range(len(segmentation.names))
            ]
    return ome if zarr_format == 2 else {"ome": version_attribute | ome}


def _get_color(value: int) -> list[int]:
    """Return the RGBA color of a class in the label files for ImageJ. The background is transparent."""
    colors = make_label_colors()
    index = (value - 1) % 255 + 1 if value else 0
    return [colors[256 * channel + index] >> 8 for channel in range(3)] + [255 if value else 0]


def _describe_axes(segmentation: Segmentation) -> list[dict[str, str]]:
    """Return the metadata of each axis."""
    units = dict.fromkeys("ZYX", "micrometer") if segmentation.voxel_size else {}
    interval = segmentation.time_interval
    if interval is not None and interval.unit in _TIME_UNITS:
        units["T"] = _TIME_UNITS[interval.unit]
    return [
        {"name": axis.lower(), "type": _AXIS_TYPES.get(axis, "space")}
        | ({"unit": units[axis]} if axis in units else {})
        for axis in segmentation.axes
    ]


def _describe_channel(label: str) -> dict[str, Any]:
    return {"label": label, "color": "FFFFFF", "window": {"min": 0, "max": 1, "start": 0, "end": 1}, "active": True}


def register_label(labels: Any, name: str, zarr_format: int) -> None:
    """Add the name of a label image to the list in the `labels` group."""
    ome = dict(labels.attrs) if zarr_format == 2 else dict(labels.attrs.get("ome", {}))
    ome["labels"] = sorted({*ome.get("labels", ()), name})
    labels.attrs.update(ome if zarr_format == 2 else {"ome": {"version": OME_VERSIONS[zarr_format]} | ome})
