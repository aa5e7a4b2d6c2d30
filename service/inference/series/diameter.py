"""Choice of one object diameter for a series of volumes, based on estimates for some of the volumes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

from service.core.quantities import Diameter, VoxelSize
from service.inference.types import DiameterEstimate, describe_default_diameter

T = TypeVar("T")


def select_evenly_spaced(members: Sequence[T], count: int) -> Sequence[T]:
    """Return up to `count` evenly spaced members of a series."""
    step = max(len(members) / count, 1)
    return [members[int(index * step)] for index in range(min(count, len(members)))]


def choose_diameter(
    estimates: Sequence[tuple[DiameterEstimate, VoxelSize | None]], sample_description: str
) -> tuple[str, str]:
    """Choose the diameter for a series: the median of the available estimates.

    Args:
        estimates: estimates for sampled volumes, with the voxel sizes of the volumes
        sample_description: description of the sampled volumes, such as "5 stacks of the folder"

    Returns the value for the parameter `diameter`, and a note. The value is "none" if no resampling is needed, and the
    default diameter of the model if it suits all volumes.
    """
    usable_estimates = _select_usable(estimates)
    if not usable_estimates:
        return "none", (
            "The object diameter could not be estimated, so the original resolution is used."
            " If you know the diameter, set diameter=."
        )
    default = estimates[0][0].default
    if default is not None and not any(estimate.is_estimated for estimate, _ in estimates):
        return str(default), describe_default_diameter(default)
    diameter = _compute_median([(diameters, voxel_size) for diameters, voxel_size, _ in usable_estimates])
    note_start = (
        f"Objects seem to be {diameter.describe()} (measured in {len(usable_estimates)} of {sample_description})"
    )
    if 2 * sum(matches_model for *_, matches_model in usable_estimates) > len(usable_estimates):
        return "none", f"{note_start}, which suits the model without resampling. If this is wrong, set diameter=."
    return str(diameter), f"{note_start}. If this is wrong, set diameter=."


def _select_usable(
    estimates: Sequence[tuple[DiameterEstimate, VoxelSize | None]],
) -> list[tuple[tuple[float, float, float], VoxelSize | None, bool]]:
    """Return the estimates in voxels, the voxel sizes, and whether the estimates match the model."""
    return [
        (diameters, voxel_size, estimate.matches_model)
        for estimate, voxel_size in estimates
        if estimate.diameter is not None and (diameters := estimate.diameter.to_voxels(voxel_size)) is not None
    ]


def _compute_median(estimates: Sequence[tuple[tuple[float, float, float], VoxelSize | None]]) -> Diameter:
    """Return the median diameter in voxels, or in micrometers if the voxel sizes of the volumes differ."""
    voxel_sizes = {voxel_size for _, voxel_size in estimates}
    if len(voxel_sizes) == 1 or None in voxel_sizes:
        return Diameter(_compute_medians([diameters for diameters, _ in estimates]), "px")
    diameters_um = [
        tuple(n * spacing for n, spacing in zip(diameters, voxel_size or (), strict=True))
        for diameters, voxel_size in estimates
    ]
    return Diameter(_compute_medians(diameters_um), "um")


def _compute_medians(diameters: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    z, y, x = (statistics.median(sizes[axis] for sizes in diameters) for axis in range(3))
    return z, y, x
