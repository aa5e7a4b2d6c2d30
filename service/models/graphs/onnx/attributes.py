"""Convert attributes of ONNX nodes to arguments of torch functions and modules.

All functions raise UnsupportedCall with the name of the attribute if torch has no equivalent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from service.core.types import Array
from service.models.graphs.onnx.elementwise import UnsupportedCall, Value

# Parameter names that the functions in `operators` use for attributes whose names are unsuitable as Python names.
PARAMETER_NAMES = {"min": "lowest", "max": "highest", "transA": "transpose_a", "transB": "transpose_b"}
IGNORED_ATTRIBUTES = {"ratio", "seed", "saturate", "stash_type"}
# Interpolation mode, coordinate transformation and rounding in ONNX -> equivalent mode of `functional.interpolate`.
TORCH_MODES = {
    ("nearest", "asymmetric", "floor"): "nearest",
    ("nearest", "half_pixel", "round_prefer_floor"): "nearest-exact",
    ("nearest", "half_pixel", "round_prefer_ceil"): "nearest-exact",
    ("linear", "half_pixel"): "trilinear",
    ("linear", "pytorch_half_pixel"): "trilinear",
    ("linear", "align_corners"): "corners",
}


def read_settings(function: Callable[..., Value], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert attributes to keyword arguments of a function.

    Raises UnsupportedCall for an attribute that is not a parameter of the function. The check is also needed for
    safety, because the names become part of generated Python code.
    """
    parameters = inspect.signature(function).parameters
    settings = dict[str, Any]()
    for attribute in sorted(attributes.keys() - IGNORED_ATTRIBUTES):
        name = PARAMETER_NAMES.get(attribute, attribute)
        if name not in parameters or parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            raise UnsupportedCall(f"{attribute}: this attribute is not supported.")
        value = attributes[attribute]
        settings[name] = value.item() if isinstance(value, np.ndarray) else value
    return settings


def read_window(attributes: Mapping[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
    """Return stride, dilation, and the padding in voxels at the start and end of each axis."""
    if len(kernel) != 3:
        raise UnsupportedCall(f"kernel_shape: the value is {tuple(kernel)}; exactly three axes (z, y, x) are required.")
    stride, dilation = (tuple(attributes.get(key, (1, 1, 1))) for key in ("strides", "dilations"))
    pads = tuple(attributes.get("pads", (0,) * 6))
    auto_pad = attributes.get("auto_pad", "NOTSET")
    if auto_pad in {"SAME_UPPER", "SAME_LOWER"} and stride == (1, 1, 1):
        total_padding = [rate * (length - 1) for rate, length in zip(dilation, kernel, strict=True)]
        smaller_half, larger_half = (
            tuple(total // 2 for total in total_padding),
            tuple(total - total // 2 for total in total_padding),
        )
        pads = smaller_half + larger_half if auto_pad == "SAME_UPPER" else larger_half + smaller_half
    elif auto_pad not in {"NOTSET", "VALID"}:
        raise UnsupportedCall(
            f"auto_pad: {auto_pad} with strides {stride} is not supported; export the network with pads instead."
        )
    return {"stride": stride, "dilation": dilation, "start_padding": pads[:3], "end_padding": pads[3:]}


def read_torch_mode(attributes: Mapping[str, Any], *, is_legacy: bool) -> str:
    """Return the torch interpolation mode of a Resize node. `is_legacy` selects the defaults of old opsets."""
    coordinates = str(attributes.get("coordinate_transformation_mode", "asymmetric" if is_legacy else "half_pixel"))
    mode = str(attributes.get("mode", "nearest"))
    rounding = str(attributes.get("nearest_mode", "floor" if is_legacy else "round_prefer_floor"))
    if attributes.get("antialias") or "axes" in attributes:
        raise UnsupportedCall("antialias or axes: these attributes are not supported.")
    torch_mode = TORCH_MODES.get((mode, coordinates, rounding) if mode == "nearest" else (mode, coordinates))
    if torch_mode is None:
        problem = f"mode: the combination of {mode}, {coordinates} and {rounding} is not supported."
        raise UnsupportedCall(f"{problem} Export the network with opset 11 or later." if is_legacy else problem)
    return torch_mode


def read_constant(attributes: Mapping[str, Any]) -> Array:
    """Return the value of a Constant node."""
    for key in ("value_int", "value_ints", "value_float", "value_floats"):
        if key in attributes:
            return np.array(attributes[key], np.int64 if "int" in key else np.float32)
    if not isinstance(attributes.get("value"), np.ndarray):
        raise UnsupportedCall("value: this kind of constant is not supported.")
    array: Array = attributes["value"]
    return array
