"""One diameter of objects for a series of volumes, from estimates for a few of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

from service.core.quantities import Diameter, VoxelSize
from service.inference.types import Sizing

T = TypeVar("T")


def sample(members: Sequence[T], count: int) -> Sequence[T]:
    """Return up to `count` members of a series, evenly spread over it."""
    step = max(len(members) / count, 1)
    return [members[int(index * step)] for index in range(min(count, len(members)))]


def choose_diameter(estimates: Sequence[tuple[Sizing, VoxelSize | None]], of: str) -> tuple[str, str]:
    """Choose the diameter for a series, the median of the estimates that tell one.

    Args:
        estimates: for sampled volumes, with their voxel sizes
        of: what was sampled, such as "5 stacks of the folder"
    Returns the parameter `diameter`, "none" where the volumes are best used as they are sampled, and a note.
    """
    found = [
        (width, voxel_size, sizing.fits)
        for sizing, voxel_size in estimates
        if sizing.diameter is not None and (width := sizing.diameter.in_voxels(voxel_size)) is not None
    ]
    if not found:
        return "none", "How wide objects are could not be told: used as sampled; state diameter=."
    diameter = _median([(width, voxel_size) for width, voxel_size, _ in found])
    seen = f"Objects seem to be {diameter} wide ({len(found)} of {of} looked at)"
    if 2 * sum(fits for *_, fits in found) > len(found):
        return "none", f"{seen}, which suits the model as it is sampled; state diameter= where that is wrong."
    return str(diameter), f"{seen}; state diameter= where that is wrong."


def _median(found: Sequence[tuple[tuple[float, float, float], VoxelSize | None]]) -> Diameter:
    """Return the median of widths in voxels; in micrometres where volumes are sampled differently."""
    sizes = {voxel_size for _, voxel_size in found}
    if len(sizes) == 1 or None in sizes:
        return Diameter(_medians([width for width, _ in found]), "px")
    lengths = [tuple(n * edge for n, edge in zip(width, voxel_size or (), strict=True)) for width, voxel_size in found]
    return Diameter(_medians(lengths), "um")


def _medians(widths: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    z, y, x = (statistics.median(width[axis] for width in widths) for axis in range(3))
    return z, y, x
