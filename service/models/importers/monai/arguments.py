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
    "Activationsd": "sigmoid softmax",
    "AsDiscreted": "argmax to_onehot threshold",
}
_FLOATING_POINT_TYPES = frozenset(["float", "float16", "float32", "float64", "half", "double"])


def check_arguments(name: str, step: Fields) -> None:
    """Raise UnsupportedPackage if a transform has an argument whose effect is not reproduced."""
    if name not in _ARGUMENTS:
        return
    known_arguments = _NEUTRAL_ARGUMENTS.union(_ARGUMENTS[name].split())
    for key, value in step.as_dict().items():
        if key not in known_arguments and value not in (None, False):
            raise UnsupportedPackage(f"{step.locate(key)}: this argument of {name} is not supported.")
    dtype = step.get("dtype")
    if dtype is not None and str(dtype).rpartition(".")[2] not in _FLOATING_POINT_TYPES:
        raise UnsupportedPackage(f"{step.locate('dtype')}: only floating-point types are supported, not {dtype!r:.80}.")
    if name == "NormalizeIntensityd" and ("subtrahend" in step) != ("divisor" in step):
        raise UnsupportedPackage(
            f"{step.locate('subtrahend')}: a fixed subtrahend with the standard deviation of the image, or a fixed "
            "divisor with its mean, is not supported; both or neither must be specified."
        )
    if name == "Activationsd" and step.get("sigmoid") and step.get("softmax"):
        raise UnsupportedPackage(f"{step.locate('softmax')}: sigmoid and softmax cannot be applied together.")


def is_positive_number(value: object) -> bool:
    """Return whether a value is a finite number greater than 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
