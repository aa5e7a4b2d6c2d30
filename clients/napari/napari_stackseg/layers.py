"""Layers of napari as stacks for the server, and results of the server as layers.

Axes are letters of TZCYXS, one per dimension of the layer's data. S are the samples of RGB images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

VoxelSize = tuple[float, float, float]

_LETTERS = {"time": "T", "channel": "C", "depth": "Z", "height": "Y", "width": "X"}
# Events of a layer after which its axes or its voxel size may differ.
CALIBRATION_EVENTS = ("data", "axis_labels", "scale", "rotate", "affine", "units")
# Axes to choose from if a layer does not name them. The first is the most frequent one.
AXES_CHOICES = {
    2: ["YX"],
    3: ["ZYX", "TYX"],
    4: ["TZYX", "CZYX", "ZCYX"],
    5: ["TCZYX", "TZCYX", "CTZYX"],
}


def get_pixels(layer: Any) -> Any:
    """Return the array of a layer at full resolution."""
    return layer.data[0] if layer.multiscale else layer.data


def list_axes(layer: Any) -> list[str]:
    """Return the possible axes of a layer: those that it names, or else the usual ones. Empty if there are none."""
    suffix = "S" if getattr(layer, "rgb", False) else ""
    names = [str(label).lower() for label in layer.axis_labels]
    named = "".join(_LETTERS.get(name, name.upper()) for name in names)
    if len(named) == layer.ndim == len(set(named)) and set("YX") <= set(named) <= set("TZCYX"):
        return [named + suffix]
    return [axes + suffix for axes in AXES_CHOICES.get(layer.ndim, [])]


def get_voxel_size(layer: Any, axes: str) -> tuple[VoxelSize | None, str]:
    """Return the voxel size Z, Y, X in micrometers, and where it is from. None if the layer has none.

    The scale, the rotation and the affine transformation of the layer contribute to it. Planes without Z have the depth
    of a pixel, as the server assumes for them.
    """
    spatial = [axis for axis in "ZYX" if axis in axes]
    positions = [axes.index(axis) for axis in spatial]
    units = [layer.units[index] for index in positions]
    known = list(filter(None, map(_convert_to_micrometers, units)))
    if len(known) not in {0, len(units)}:
        named = ", ".join(map("{} {}".format, "".join(spatial).lower(), units))
        return None, f"Not all axes of the layer have a unit of length: {named}. Enter the voxel size."
    sizes = _measure_steps(layer, positions, known or [1.0] * len(units))
    if not known and set(sizes) == {1.0}:
        return None, "The layer has no voxel size."
    note = "from the layer" if known else "The scale of the layer has no unit; taken as µm."
    return _add_depth(sizes, note)


def _add_depth(sizes: list[float], note: str) -> tuple[VoxelSize, str]:
    """Return the sizes Z, Y, X and the note of sizes that may lack Z."""
    if len(sizes) == 2:
        sizes = [math.sqrt(math.prod(sizes)), *sizes]
        note = f"{note.rstrip('.')}. The plane is taken as one pixel deep."
    z, y, x = sizes
    return (z, y, x), note


def _measure_steps(layer: Any, positions: list[int], factors: list[float]) -> list[float]:
    """Return the distances between neighboring voxels along the axes at these positions.

    factors  lengths of the units of the axes
    """
    matrix = np.asarray(layer.affine.affine_matrix, float)[:-1, :-1] @ np.asarray(layer.rotate, float)
    steps = (matrix * np.asarray(layer.scale, float))[np.ix_(positions, positions)]
    # The units are those of the rows.
    return [float(step) for step in np.linalg.norm(steps * np.array(factors)[:, None], axis=0).round(12)]


def _convert_to_micrometers(unit: Any) -> float | None:
    """Return the length of a unit in micrometers; None if it is not one of length."""
    return float((1 * unit).to("micrometer").magnitude) if unit.is_compatible_with("micrometer") else None


def make_labels_layer(
    labels: NDArray[Any], image: Any, axes: str, chosen: dict[str, int]
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Return labels [T, Z, Y, X] or [Z, Y, X] and the arguments that place them on their image.

    axes    axes of the image
    chosen  index of the segmented channel C and time point T, if there are several; labels have only this one

    napari aligns the last dimensions of layers, so an axis without labels is dropped only if it comes first. Raises
    ValueError for a sheared image with such an axis.
    """
    axes = axes.rstrip("S")
    labels_axes = "TZYX"[-labels.ndim :]
    if "Z" not in axes:
        labels, labels_axes = labels[..., 0, :, :], labels_axes.replace("Z", "")
    order = [axis for axis in axes if axis in labels_axes]
    first = axes.index(order[0])
    kept = list(range(first, len(axes)))
    placed = labels.transpose([labels_axes.index(axis) for axis in order])
    translate = np.array(image.translate, float)
    for index in kept:
        if axes[index] not in labels_axes:
            placed = np.expand_dims(placed, index - first)
            translate[index] += image.scale[index] * chosen.get(axes[index], 0)
    return placed, {**_list_transformations(image, kept), "translate": translate[kept]}


def _list_transformations(image: Any, kept: list[int]) -> dict[str, Any]:
    """Return the arguments of a layer at the place of an image without its first axes."""
    if kept[0] and np.any(image.shear):
        raise ValueError("The image is sheared. Split its channels or time points into layers first.")
    affine = [*kept, kept[-1] + 1]
    return {
        "scale": np.asarray(image.scale)[kept],
        "rotate": np.asarray(image.rotate)[np.ix_(kept, kept)],
        "affine": np.asarray(image.affine.affine_matrix)[np.ix_(affine, affine)],
        "units": [image.units[index] for index in kept],
        "axis_labels": [image.axis_labels[index] for index in kept],
    } | ({} if kept[0] else {"shear": image.shear})


def get_position(layer: Any, point: Sequence[float], axes: str, axis: str) -> int:
    """Return the index along one axis of a layer at a point in world coordinates, such as the displayed time point."""
    position = axes.index(axis)
    index = round(float(layer.world_to_data(point[-layer.ndim :])[position]))
    length = int(get_pixels(layer).shape[position])
    return min(max(index, 0), length - 1)


def take_volume(labels: NDArray[Any], axes: str, time: int | None) -> NDArray[Any]:
    """Return the labels [Z, Y, X] of one time point from the data of a Labels layer for an image with these axes.

    The inverse of `make_labels_layer`. Raises ValueError if the layer does not have the axes of the image.
    """
    shown = axes.rstrip("S")[-labels.ndim :]
    if not set("ZYX") <= set(shown) or len(shown) != labels.ndim:
        raise ValueError(f"The labels have {labels.ndim} dimensions, which are not those of the image ({axes}).")
    lengths = dict(zip(shown, labels.shape, strict=True))
    if lengths.get("C", 1) > 1:
        raise ValueError("The labels have several channels. Save the labels of one channel.")
    chosen = {"T": (time or 0) if lengths.get("T", 1) > 1 else 0, "C": 0}
    index = tuple(chosen.get(axis, slice(None)) for axis in shown)
    order = [axis for axis in shown if axis in "ZYX"]
    return labels[index].transpose([order.index(axis) for axis in "ZYX"])


def make_features(table: dict[str, NDArray[Any]] | None) -> dict[str, Any]:
    """Return a table of measurements as features: napari finds the row of a label in the column `index`."""
    return {"index": table["label"], **table} if table and "label" in table else {}


def describe_stack(axes: str, shape: Sequence[int] | None, voxel_size: VoxelSize | None) -> str:
    """Return axes, size and voxel size for people."""
    words = {"T": "time", "C": "channel", "Z": "depth", "Y": "height", "X": "width", "S": "color"}
    named = ", ".join(words.get(axis, axis) for axis in axes)
    size = " × ".join(map(str, shape)) if shape else "unknown size"
    voxels = "unknown voxel size" if voxel_size is None else " × ".join(f"{length:g}" for length in voxel_size) + " µm"
    return f"Axes: {named}. {size}, voxels {voxels}."
