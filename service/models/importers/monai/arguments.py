"""Arguments of MONAI transforms that the importer of bundles reproduces. All others are rejected by name."""

from __future__ import annotations

import math

from service.core.errors import UnsupportedPackage
from service.models.importers.draft import Fields

# Arguments that do not change the values of an image, and keys of the bundle format itself.
_NEUTRAL_ARGUMENTS = frozenset(
    ["keys", "allow_missing_keys", "_target_", "_desc_", "_disabled_", "_requires_", "_mode_"]
)
_ARGUMENTS = {
    "ScaleIntensityRanged": "a_min a_max b_min b_max clip dtype",
    "ScaleIntensityRangePercentilesd": "lower upper b_min b_max clip relative channel_wise dtype",
    "ScaleIntensityd": "minv maxv factor channel_wise dtype",
    "NormalizeIntensityd": "subtrahend divisor nonzero channel_wise dtype",
    "Spacingd": "pixdim mode padding_mode diagonal align_corners dtype recompute_affine min_pixdim max_pixdim "
    "ensure_same_shape lazy",
    "Activationsd": "sigmoid softmax",
    "AsDiscreted": "argmax to_onehot threshold",
}
# Types to which images may be converted, as they hold all intensities without rounding.
_DTYPES = frozenset(["float", "float32", "float64", "double"])


def check_arguments(name: str, step: Fields) -> None:
    """Raise UnsupportedPackage if a transform has an argument whose effect is not reproduced."""
    if name not in _ARGUMENTS:
        return
    known_arguments = _NEUTRAL_ARGUMENTS.union(_ARGUMENTS[name].split())
    for key, value in step.as_dict().items():
        if key not in known_arguments and value not in (None, False):
            raise UnsupportedPackage(f"{step.locate(key)}: this argument of {name} is not supported.")
    check_dtypes(step)
    if name == "Activationsd" and is_enabled(step, "sigmoid") and is_enabled(step, "softmax"):
        raise UnsupportedPackage(f"{step.locate('softmax')}: sigmoid and softmax cannot be applied together.")


def check_dtypes(step: Fields) -> None:
    """Raise UnsupportedPackage if a transform converts an image to a type that rounds its intensities."""
    value = step.get("dtype")
    for dtype in value if isinstance(value, list) else [value]:
        if dtype is not None and str(dtype).rpartition(".")[2] not in _DTYPES:
            raise UnsupportedPackage(
                f"{step.locate('dtype')}: only the types float32 and float64 are supported, not {dtype!r:.80}."
            )


def is_enabled(step: Fields, key: str) -> bool:
    """Return the value of a flag, or of a list with the same flag for each key. Raises UnsupportedPackage for text."""
    value = step.get(key)
    values = value if isinstance(value, list) and value else [value]
    if any(isinstance(flag, str) for flag in values):
        raise UnsupportedPackage(
            f"{step.locate(key)}: expected true or false, not {value!r:.80}. Code from a package is never run."
        )
    flags = set(map(bool, values))
    if len(flags) > 1:
        raise UnsupportedPackage(f"{step.locate(key)}: different values for several keys are not supported: {value}.")
    return flags.pop()


def is_positive_number(value: object) -> bool:
    """Return whether a value is a finite number greater than 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
