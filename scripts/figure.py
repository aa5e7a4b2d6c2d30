"""Draw a stack and its labels: maximum projections, sections with the outlines of the objects, and the labels.

Usage: python scripts/figure.py stack.tif labels.ome.tif figure.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from skimage.segmentation import find_boundaries

from service.core.quantities import VoxelSize
from service.core.types import Selection
from service.formats import stack_reader

BACKGROUND = "#0b0e14"
TEXT = "#c9d1d9"
MAX_PIXEL_BYTES = 2**34

Array = NDArray[Any]


def colorize(labels: Array) -> Array:
    """Convert labels [Y, X] to RGB [Y, X, 3] in [0, 1].

    Objects with consecutive labels have very different hues. The background is black.
    """
    hue = (labels.astype(np.float64) * 0.61803398875) % 1.0
    rgb = np.array(plt.get_cmap("hsv")(hue * 0.92)[..., :3])
    rgb = 0.25 + 0.75 * rgb
    rgb[labels == 0] = 0
    return rgb


def to_gray(plane: Array, low: float, high: float) -> Array:
    """Convert intensities [Y, X] to gray RGB [Y, X, 3] in [0, 1], slightly brightened to show dim objects."""
    value = np.clip((plane.astype(np.float32) - low) / max(high - low, 1e-6), 0, 1) ** 0.7
    return np.repeat(value[..., None], 3, axis=2)


def draw_outlines(plane: Array, labels: Array, low: float, high: float, zoom: tuple[int, int]) -> Array:
    """Return an RGB section with the outline of each object in its color. Enlarging it keeps the outlines thin."""
    picture = np.kron(to_gray(plane, low, high), np.ones((*zoom, 1)))
    enlarged = np.kron(labels, np.ones(zoom, dtype=labels.dtype))
    edge = find_boundaries(enlarged, mode="thick" if zoom[0] > 1 else "inner") & (enlarged > 0)
    picture[edge] = colorize(enlarged)[edge]
    return picture


def project_labels(labels: Array, axis: int) -> Array:
    """Return the label of the first object along `axis`, so that objects in front hide the objects behind them."""
    first = np.argmax(labels > 0, axis=axis, keepdims=True)
    return np.take_along_axis(labels, first, axis=axis).squeeze(axis)


def project_intensities(stack: Array, axis: int) -> Array:
    """Return the maximum projection as RGB, with the contrast stretched to its own range of intensities."""
    plane = stack.max(axis)
    low, high = np.percentile(plane, (1, 99.8))
    return to_gray(plane, low, high)


def show_image(axes: Axes, picture: Array, title: str, extent: tuple[float, float]) -> None:
    height, width = extent
    axes.imshow(picture, extent=(0, width, height, 0), interpolation="nearest")
    axes.set_title(title, color=TEXT, fontsize=9, loc="left", pad=4)
    axes.set_axis_off()


def add_scale_bar(axes: Axes, width: float, height: float, unit: str) -> None:
    length = max(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n <= max(width / 4, 1))
    edge = [patheffects.withStroke(linewidth=2.5, foreground="black")]
    axes.add_patch(Rectangle((width * 0.04, height * 0.95), length, height * 0.012, color="white", path_effects=edge))
    text = axes.text(width * 0.04, height * 0.935, f"{length} {unit}", color="white", fontsize=8, va="bottom")
    text.set_path_effects(edge)


def draw_figure(stack: Array, labels: Array, voxel_size: VoxelSize | None, path: Path, title: str) -> None:
    """Write a PNG of intensities and labels, both [Z, Y, X]. Lengths are in micrometers if the voxel size is known."""
    size, unit = (voxel_size, "µm") if voxel_size else (VoxelSize(1, 1, 1), "px")
    depth, height, width = (n * s for n, s in zip(stack.shape, size, strict=True))
    low, high = np.percentile(stack, (1, 99.8))
    area = np.count_nonzero(labels, axis=(1, 2))
    z = int(np.argmax(area)) if area.any() else stack.shape[0] // 2
    y = int(np.argmax(np.count_nonzero(labels[:, labels.shape[1] // 4 : -labels.shape[1] // 4 or None], axis=(0, 2))))
    y += labels.shape[1] // 4
    count = len(np.unique(labels[labels > 0]))
    zoom = max(1, 600 // max(stack.shape[1:]))

    figure, grid = plt.subplots(
        2, 3, figsize=(12, 12 / 3 * (height + depth) / width + 0.9), dpi=110, layout="constrained",
        gridspec_kw={"height_ratios": (height, depth)}, facecolor=BACKGROUND,
    )  # fmt: skip
    flat, tall = (height, width), (depth, width)
    show_image(grid[0, 0], project_intensities(stack, 0), "maximum projection", flat)
    show_image(
        grid[0, 1], draw_outlines(stack[z], labels[z], low, high, (zoom, zoom)), f"section z = {z}, outlines", flat
    )
    show_image(
        grid[0, 2],
        colorize(project_labels(labels, 0)),
        f"{count} objects, from above",
        flat,
    )
    show_image(grid[1, 0], project_intensities(stack, 1), "along y", tall)
    show_image(grid[1, 1], draw_outlines(stack[:, y], labels[:, y], low, high, (zoom, zoom)), f"section y = {y}", tall)
    show_image(grid[1, 2], colorize(project_labels(labels, 1)), "from the side", tall)
    add_scale_bar(grid[0, 0], width, height, unit)
    figure.suptitle(title, color=TEXT, fontsize=11)
    figure.savefig(path, facecolor=BACKGROUND)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args()
    volume = stack_reader.read(arguments.stack, Selection(), MAX_PIXEL_BYTES, None)
    labels = stack_reader.read(arguments.labels, Selection(), MAX_PIXEL_BYTES, None)
    draw_figure(volume.read_all()[0], labels.read_all()[0], volume.voxel_size, arguments.figure, arguments.stack.name)


if __name__ == "__main__":
    main()
