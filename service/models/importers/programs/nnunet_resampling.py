"""Read from the plans of nnU-Net v2 how stacks are resampled: the voxel size and the functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.importers.draft import Fields

MICROMETERS_PER_MILLIMETER = 1000.0
# Defaults of nnU-Net's function, and the arguments that its planner writes.
FUNCTION_DEFAULTS = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": False}
PLANNED_ARGUMENTS = {**FUNCTION_DEFAULTS, "force_separate_z": None}
SPLINE_FUNCTION, NO_RESAMPLING = "resample_data_or_seg_to_shape", "no_resampling_hack"
RESAMPLING_FUNCTIONS = (SPLINE_FUNCTION, "resample_torch_fornnunet", "resample_torch_simple")


def has_default_resampling(configuration: Fields) -> bool:
    """Return whether images are resampled with cubic splines, and scores linearly, as `input.resampling: nnunet` does.

    configuration  a configuration of the plans
    """
    return all(
        configuration.get(f"resampling_fn_{kind}") == SPLINE_FUNCTION
        and {**FUNCTION_DEFAULTS, **configuration.get_mapping(f"resampling_fn_{kind}_kwargs").as_dict()}
        == {**PLANNED_ARGUMENTS, "order": order}
        for kind, order in (("data", 3), ("probabilities", 1))
    )


def read_voxel_size(configuration: Fields, image_axes: Sequence[int], reader: str) -> tuple[list[float] | None, str]:
    """Return the voxel size (z, y, x) in um, and a note about the unit, which plans do not specify.

    configuration  a configuration of the plans
    image_axes     axis of the network for each axis (z, y, x) of the images
    reader         name of the class that reads image files

    The voxel size is None if it is 1 along all axes, which nnU-Net assumes for files without a voxel size, or if the
    plans disable resampling. Raises UnsupportedPackage for functions that are not nnU-Net's own.
    """
    if not _has_resampling(configuration):
        return None, "The plans disable resampling, so stacks are used at their original resolution."
    values = _read_spacing(configuration, image_axes)
    text = " x ".join(f"{value:g}" for value in values)
    if all(abs(value - 1) < 1e-3 for value in values):
        return None, (
            f"The spacing of the training images, {text}, seems to be unknown, so stacks are used at their original "
            "resolution. If it is known, specify --voxel-size Z,Y,X in micrometers."
        )
    is_tiff = "tif" in reader.lower()
    sizes = [value * (1 if is_tiff else MICROMETERS_PER_MILLIMETER) for value in values]
    unit, files = ("micrometers", "TIFF files") if is_tiff else ("millimeters", "medical file formats")
    return sizes, (
        f"The spacing of the training images, {text}, was read as {unit}, the usual unit of {files}. If the unit is a "
        f"different one, specify --voxel-size Z,Y,X in micrometers, or --voxel-size none to disable resampling."
    )


def _read_spacing(configuration: Fields, image_axes: Sequence[int]) -> list[float]:
    """Return the spacing of the training images along (z, y, x)."""
    spacing, location = configuration.get("spacing"), configuration.locate("spacing")
    if not isinstance(spacing, list) or len(spacing) != 3 or not all(map(_is_positive_number, spacing)):
        raise UnsupportedPackage(f"{location}: expected three positive numbers, not {spacing!r:.80}.")
    return [spacing[axis] for axis in image_axes]


def _has_resampling(configuration: Fields) -> bool:
    """Return whether stacks are resampled. Raises UnsupportedPackage for functions that are not nnU-Net's own."""
    keys = ("resampling_fn_data", "resampling_fn_probabilities")
    names = [configuration.get(key) for key in keys]
    if names == [NO_RESAMPLING] * 2:
        return False
    for key, name in zip(keys, names, strict=True):
        if name not in RESAMPLING_FUNCTIONS:
            raise UnsupportedPackage(
                f"{configuration.locate(key)}: {name!r:.80} is not one of {', '.join(RESAMPLING_FUNCTIONS)}. To "
                "resample stacks linearly, specify the voxel size of the training data."
            )
    return True


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-12 < value < 1e12
