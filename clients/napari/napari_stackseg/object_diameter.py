"""The object diameter, measured with a line or a circle in a Shapes layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napari_stackseg.layers import VoxelSize

CIRCLE_NAME = "object diameter"
# Diameter of a new circle, as a fraction of the shorter side of the displayed plane.
CIRCLE_FRACTION = 0.2


def add_circle(viewer: Any, image: Any) -> Any:
    """Add a Shapes layer with a selected circle in the middle of the view, to be dragged over an object."""
    shapes = viewer.add_shapes(
        ndim=image.ndim,
        name=CIRCLE_NAME,
        edge_color="yellow",
        face_color="transparent",
        scale=image.scale,
        translate=image.translate,
        rotate=image.rotate,
        shear=image.shear,
        affine=image.affine,
        units=image.units,
        axis_labels=image.axis_labels,
    )
    corners = [image.world_to_data(corner) for corner in _place_square(viewer, image)]
    shapes.add_ellipses(np.array(corners), edge_width=0.02 * float(np.ptp(corners, axis=0).max()))
    shapes.mode = "select"
    shapes.selected_data = {0}
    return shapes


def _place_square(viewer: Any, image: Any) -> NDArray[Any]:
    """Return the corners [4, dimensions of the image] of a square in the middle of the view, in world coordinates."""
    dimensions = viewer.dims.ndim
    shown = [axis - dimensions + image.ndim for axis in viewer.dims.displayed[-2:]]
    lower, upper = image.extent.world
    center = np.array(viewer.dims.point, float)[-image.ndim :]
    # The camera belongs to the scene since napari 0.9.
    middle = np.array(getattr(viewer, "scene", viewer).camera.center, float)[-2:]
    # The view may show a part of the canvas without the image.
    is_inside = np.all((lower[shown] < middle) & (middle < upper[shown]))
    center[shown] = middle if is_inside else (lower[shown] + upper[shown]) / 2
    radius = CIRCLE_FRACTION / 2 * float(np.min(upper[shown] - lower[shown]))
    corners = np.tile(center, (4, 1))
    corners[:, shown] += radius * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
    return corners


def measure_shape(shapes: Any, image: Any, axes: str, voxel_size: VoxelSize | None) -> str:
    """Return the length of a line, or the diameter of a circle, as the parameter `diameter`: `6.5um` or `15px`.

    The selected shape of the layer is measured, or else the last one. The diameter of an ellipse is that of a circle
    with the same area. Without a voxel size, it is measured in voxels of the image. Raises ValueError for other shapes.
    """
    index = max(shapes.selected_data, default=len(shapes.data) - 1)
    kind = shapes.shape_type[index] if index >= 0 else "nothing"
    if kind not in {"line", "ellipse"}:
        raise ValueError(f"Draw a line or a circle across an object in a Shapes layer, or select one. Found: {kind}.")
    corners = [_locate(shapes.data_to_world(point), image, axes, voxel_size) for point in shapes.data[index]]
    lengths = [float(np.linalg.norm(corners[i + 1] - corners[i])) for i in range(1 if kind == "line" else 2)]
    diameter = math.prod(lengths) ** (1 / len(lengths))
    if diameter <= 0:
        raise ValueError("The line or circle has no length. Draw it across an object.")
    return f"{diameter:.4g}{'px' if voxel_size is None else 'um'}"


def _locate(world: Any, image: Any, axes: str, voxel_size: VoxelSize | None) -> NDArray[Any]:
    """Return a point in world coordinates as Z, Y, X in the image: in micrometers, or in voxels without their size."""
    spatial = [axes.index(axis) for axis in "ZYX" if axis in axes]
    point = np.asarray(world)[-image.ndim :]
    point = np.pad(point, (image.ndim - len(point), 0))
    steps = [1.0] * len(spatial) if voxel_size is None else voxel_size[-len(spatial) :]
    return np.asarray(image.world_to_data(point))[spatial] * steps
