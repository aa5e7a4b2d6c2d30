"""Choice of one object diameter for a series of volumes, from estimates for some of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

from service.core.quantities import Diameter, VoxelSize
from service.inference.types import DiameterEstimate

T = TypeVar("T")


def sample(members: Sequence[T], count: int) -> Sequence[T]:
    """Return up to `count` members of a series, evenly spaced."""
    step = max(len(members) / count, 1)
    return [members[int(index * step)] for index in range(min(count, len(members)))]


def choose_diameter(estimates: Sequence[tuple[DiameterEstimate, VoxelSize | None]], sampled: str) -> tuple[str, str]:
    """Choose the diameter for a series: the median of the available estimates.

    Args:
        estimates: estimates for sampled volumes, with their voxel sizes
        sampled: description of the sampled volumes, such as "5 stacks of the folder"

    Returns the value of the parameter `diameter` and a note. The value is "none" if the original resolution suits best.
    """
    found = [
        (width, voxel_size, sizing.matches_model)
        for sizing, voxel_size in estimates
        if sizing.diameter is not None and (width := sizing.diameter.in_voxels(voxel_size)) is not None
    ]
    if not found:
        return "none", (
            "The object diameter could not be estimated, so the original resolution is used."
            " If you know the diameter, set diameter=."
        )
    diameter = _median([(width, voxel_size) for width, voxel_size, _ in found])
    estimate = f"Objects seem to be {diameter.describe()} (measured in {len(found)} of {sampled})"
    if 2 * sum(fits for *_, fits in found) > len(found):
        return "none", f"{estimate}, which suits the model without resampling. If this is wrong, set diameter=."
    return str(diameter), f"{estimate}. If this is wrong, set diameter=."


def _median(found: Sequence[tuple[tuple[float, float, float], VoxelSize | None]]) -> Diameter:
    """Return the median of widths in voxels, or in micrometers if the voxel sizes of the volumes differ."""
    voxel_sizes = {voxel_size for _, voxel_size in found}
    if len(voxel_sizes) == 1 or None in voxel_sizes:
        return Diameter(_medians([width for width, _ in found]), "px")
    lengths = [tuple(n * edge for n, edge in zip(width, voxel_size or (), strict=True)) for width, voxel_size in found]
    return Diameter(_medians(lengths), "um")


def _medians(widths: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    z, y, x = (statistics.median(width[axis] for width in widths) for axis in range(3))
    return z, y, x
