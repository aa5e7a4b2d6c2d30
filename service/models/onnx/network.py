"""Networks that come as ONNX files: their graph as a torch module, which every engine runs like any other.

No runtime of ONNX is involved, and nothing of a file is run but the operators that are listed here and in
`service.models.onnx.operators`, whatever a file calls itself or brings along.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.core.volume import Array
from service.models.onnx import file
from service.models.onnx.file import Call, Model, Place
from service.models.onnx.operators import OPERATORS, Refused, Value, average_pool, max_pool, resize, softmax_flattened

STANDARD = {"", "ai.onnx"}
AXES = 5
# Inputs of these that are stored are numbers for the call, not tensors for the network.
NUMBERS = {"Resize", "Upsample", "Pad", "Clip", "Range", "Reshape", "Expand"}
IGNORED = {"ratio", "seed", "saturate", "stash_type"}
WAYS = {
    ("nearest", "asymmetric", "floor"): "nearest",
    ("nearest", "half_pixel", "round_prefer_floor"): "nearest-exact",
    ("nearest", "half_pixel", "round_prefer_ceil"): "nearest-exact",
    ("linear", "half_pixel"): "trilinear",
    ("linear", "pytorch_half_pixel"): "trilinear",
    ("linear", "align_corners"): "corners",
}
_DAMAGE = (ValueError, TypeError, IndexError, KeyError, RuntimeError)


def load_onnx(path: Path) -> nn.Module:
    """The network of an `.onnx` file, float32 on the CPU, in evaluation mode.

    A file whose batch axis is fixed to one is run window by window. Raises BrokenModel, naming what is refused.
    """
    model = file.read(path)
    try:
        network = _Builder(model).network(image_of(model))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise BrokenModel(f"{path}: cannot be made a network of: {error}") from error
    return network.eval().requires_grad_(requires_grad=False)


def image_of(model: Model) -> Place:
    """The one input, [batch, channel, z, y, x] of floating point. Raises BrokenModel for any other."""
    if len(model.inputs) != 1:
        raise BrokenModel(f"graph.input: it takes {len(model.inputs)} inputs; exactly one image can be given.")
    (image,) = model.inputs
    if image.shape is not None and len(image.shape) != AXES:
        raise BrokenModel(
            f"graph.input {image.name}: {len(image.shape)} axes; only batch, channel, z, y, x can be honoured."
        )
    if image.dtype not in file.NAMES:
        raise BrokenModel(f"graph.input {image.name}: data type {image.dtype}; only floating point can be honoured.")
    if image.shape is not None and image.shape[0] not in {None, 1}:
        raise BrokenModel(
            f"graph.input {image.name}: a batch of {image.shape[0]}; export it with one window, or any number."
        )
    return image


class Given(NamedTuple):
    """What goes into a step: the value of that name, a tensor of the file by its attribute's name, or a number."""

    kind: str
    what: Any


@dataclass(frozen=True)
class Step:
    """One call. `function`: also the number of a layer; `spent`: values that nobody needs any more."""

    operator: str
    function: Callable[..., Value] | int
    inputs: tuple[Given, ...]
    settings: Mapping[str, Any]
    outputs: tuple[str, ...]
    spent: tuple[str, ...]


class OnnxNetwork(nn.Module):
    """[B, C, z, y, x] -> [B, K, z, y, x]. Of several outputs the first.

    image   the input of the file, whose shape binds where it is stated
    """

    def __init__(self, image: Place, result: str, layers: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.steps: tuple[Step, ...] = ()
        self._image, self._result = image.name, result
        self._shape = image.shape
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError for a shape or a step that the file does not allow for."""
        if self._shape is not None:
            fixed = [edge is None or edge == length for edge, length in zip(self._shape[1:], x.shape[1:], strict=True)]
            if not all(fixed):
                raise ValueError(f"the file fixes its input to {self._shape}")
            if self._shape[0] == 1 and len(x) > 1:
                return torch.cat([self._run(window[None]) for window in x.unbind(0)])
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        values: dict[str, Value] = {self._image: x}
        for step in self.steps:
            given = [self._given(each, values) for each in step.inputs]
            function = self.layers[step.function] if isinstance(step.function, int) else step.function
            made = function(*given, **step.settings)
            several = made if step.operator == "Split" else (made,)
            values.update(zip(step.outputs, several, strict=True))
            for name in step.spent:
                del values[name]
        scores: Tensor = values[self._result]
        return scores

    def _given(self, given: Given, values: Mapping[str, Value]) -> Value:
        if given.kind == "value":
            return values[given.what]
        return getattr(self, given.what) if given.kind == "tensor" else given.what


class _Builder:
    """One network while it is put together. `made`: names of values that some call gives."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._stored = dict(model.tensors)
        self._layers: list[nn.Module] = []
        self._tensors: dict[str, Tensor] = {}
        self._attributes: dict[str, str] = {}
        self._made: set[str] = set()

    def network(self, image: Place) -> OnnxNetwork:
        """The whole of it. Raises BrokenModel."""
        if not self._model.outputs:
            raise BrokenModel("graph.output: nothing comes out of it.")
        result = self._model.outputs[0].name
        self._made.add(image.name)
        steps = []
        for call in self._model.calls:
            if call.domain not in STANDARD:
                raise BrokenModel(
                    f"{call.operator} of {call.domain} is not an operator of ONNX; no code of others is run."
                )
            try:
                step = self._step(call)
            except Refused as error:
                raise BrokenModel(f"{call.operator}: {error}") from error
            if step is not None:
                steps.append(step)
                self._made |= set(step.outputs)
        if result not in self._made:
            raise BrokenModel(f"graph.output {result}: nothing makes it.")
        network = OnnxNetwork(image, result, self._layers, self._tensors)
        network.steps = _freed(steps, result)
        return network

    def _step(self, call: Call) -> Step | None:
        if call.operator == "Constant":
            self._stored[call.outputs[0]] = _constant(call.attributes)
            return None
        if call.operator == "Identity" and call.inputs[0] in self._stored:
            # Exporters store equal weights once, and give them further names.
            self._stored[call.outputs[0]] = self._stored[call.inputs[0]]
            return None
        special = _SPECIAL.get(call.operator)
        if special is not None:
            return special(self, call)
        function = (
            softmax_flattened if call.operator == "Softmax" and self._model.opset < 13 else OPERATORS.get(call.operator)
        )
        if function is None:
            raise BrokenModel(f"{call.operator} is not on the list in service/models/onnx/operators.py.")
        return self._called(call, function, call.attributes)

    def _called(
        self, call: Call, function: Callable[..., Value] | int, settings: Mapping[str, Any], inputs: int | None = None
    ) -> Step:
        """The call of a function, or of a layer with its first inputs only."""
        kept = {name: value for name, value in settings.items() if name not in IGNORED}
        if not isinstance(function, int):
            known = inspect.signature(function).parameters.values()
            unknown = kept.keys() - {parameter.name for parameter in known}
            if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
                raise Refused(f"{min(unknown)}: cannot be honoured.")
        given = tuple(self._given(call, name) for name in call.inputs[:inputs])
        return Step(
            call.operator, function, given, kept, call.outputs if call.operator == "Split" else call.outputs[:1], ()
        )

    def _given(self, call: Call, name: str) -> Given:
        if not name:
            return Given("number", None)
        if name in self._made:
            return Given("value", name)
        array = self._stored.get(name)
        if array is None:
            raise Refused(f"{name}: nothing makes it.")
        if array.ndim == 0 or (array.ndim == 1 and (array.dtype.kind != "f" or call.operator in NUMBERS)):
            return Given("number", tuple(array.tolist()) if array.ndim else array.item())
        if name not in self._attributes:
            self._attributes[name] = f"tensor_{len(self._tensors)}"
            self._tensors[self._attributes[name]] = _tensor(array)
        return Given("tensor", self._attributes[name])

    def _weights(self, call: Call, index: int) -> Tensor | None:
        """A stored tensor of the layer; None for an input that is left out."""
        name = call.inputs[index] if index < len(call.inputs) else ""
        if not name:
            return None
        if name not in self._stored:
            raise Refused(f"input {index}: weights that are computed cannot be honoured.")
        return _tensor(self._stored[name])

    def _needed(self, call: Call, index: int) -> Tensor:
        weights = self._weights(call, index)
        if weights is None:
            raise Refused(f"input {index}: is left out.")
        return weights

    def _layer(self, call: Call, module: nn.Module) -> Step:
        self._layers.append(module)
        return self._called(call, len(self._layers) - 1, {}, inputs=1)

    def _convolution(self, call: Call) -> Step:
        weight, bias = self._needed(call, 1), self._weights(call, 2)
        if weight.dim() != AXES:
            raise Refused(f"W: {weight.dim() - 2} axes in space; only networks of z, y and x can be honoured.")
        transposed = call.operator == "ConvTranspose"
        settings = _window(call.attributes, tuple(weight.shape[2:]))
        groups = int(call.attributes.get("group", 1))
        kind: Any = nn.ConvTranspose3d if transposed else nn.Conv3d
        channels = (weight.shape[1] * groups, weight.shape[0])
        if transposed:
            channels = (weight.shape[0], weight.shape[1] * groups)
            if "output_shape" in call.attributes:
                raise Refused("output_shape: cannot be honoured; export it with output_padding.")
            settings["output_padding"] = call.attributes.get("output_padding", (0, 0, 0))
        before, after = settings.pop("before"), settings.pop("after")
        padded = before == after
        if transposed and not padded:
            raise Refused("pads: before and after an axis differ.")
        with torch.device("meta"):
            module = kind(
                *channels,
                tuple(weight.shape[2:]),
                groups=groups,
                bias=False,
                padding=before if padded else 0,
                **settings,
            )
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if padded:
            return self._layer(call, module)
        ends = [n for end in reversed(list(zip(before, after, strict=True))) for n in end]
        return self._layer(call, nn.Sequential(nn.ConstantPad3d(tuple(ends), 0.0), module))

    def _batch_norm(self, call: Call) -> Step:
        if call.attributes.get("training_mode"):
            raise Refused("training_mode: export the network in evaluation mode.")
        scale, bias, mean, variance = (self._needed(call, index) for index in range(1, 5))
        module = nn.BatchNorm3d(len(mean), eps=call.attributes.get("epsilon", 1e-5))
        module.load_state_dict(
            {"weight": scale, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False
        )
        return self._layer(call, module)

    def _pooling(self, call: Call) -> Step:
        attributes = dict(call.attributes)
        kernel = attributes.pop("kernel_shape")
        counted = bool(attributes.pop("count_include_pad", 0))
        settings = _window(attributes, kernel)
        before, after = settings.pop("before"), settings.pop("after")
        settings |= {"kernel_size": kernel, "ceil_mode": bool(attributes.get("ceil_mode", 0))}
        ends = [n for end in reversed(list(zip(before, after, strict=True))) for n in end]
        if call.operator == "AveragePool":
            if settings.pop("dilation") != (1, 1, 1) or before != after:
                raise Refused("dilations or pads: cannot be honoured.")
            return self._called(call, average_pool, settings | {"padding": before, "count_include_pad": counted})
        return self._called(call, max_pool, settings | {"ends": ends})

    def _resize(self, call: Call) -> Step:
        attributes = dict(call.attributes)
        old = call.operator == "Upsample" or self._model.opset < 11
        placed = str(attributes.get("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"))
        mode = str(attributes.get("mode", "nearest"))
        rounded = str(attributes.get("nearest_mode", "floor" if old else "round_prefer_floor"))
        if attributes.get("antialias") or "axes" in attributes:
            raise Refused("antialias or axes: cannot be honoured.")
        way = WAYS.get((mode, placed, rounded) if mode == "nearest" else (mode, placed))
        if way is None:
            raise Refused(f"mode: {mode} with {placed}, {rounded} cannot be honoured.")
        inputs = (call.inputs[0], "", *call.inputs[1:]) if old else call.inputs
        return self._called(Call("Resize", "", inputs, call.outputs, {}), resize, {"way": way})


_SPECIAL: dict[str, Callable[[_Builder, Call], Step]] = {
    "Conv": _Builder._convolution,
    "ConvTranspose": _Builder._convolution,
    "BatchNormalization": _Builder._batch_norm,
    "MaxPool": _Builder._pooling,
    "AveragePool": _Builder._pooling,
    "Resize": _Builder._resize,
    "Upsample": _Builder._resize,
}


def _freed(steps: Sequence[Step], result: str) -> tuple[Step, ...]:
    """The same, each with the values for which it is the last: all of them together take many times the memory."""
    needed = {result}
    freed = []
    for step in reversed(steps):
        used = {each.what for each in step.inputs if each.kind == "value"} | set(step.outputs)
        spent = tuple(sorted(used - needed))
        needed |= used
        freed.append(Step(step.operator, step.function, step.inputs, step.settings, step.outputs, spent))
    return tuple(reversed(freed))


def _window(attributes: Mapping[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
    """Stride, dilation, and voxels padded before and after each axis."""
    if len(kernel) != 3:
        raise Refused(f"kernel_shape: {tuple(kernel)}; only networks of volumes, with z, y and x, can be honoured.")
    stride, dilation = (tuple(attributes.get(key, (1, 1, 1))) for key in ("strides", "dilations"))
    pads = tuple(attributes.get("pads", (0,) * 6))
    automatic = attributes.get("auto_pad", "NOTSET")
    if automatic in {"SAME_UPPER", "SAME_LOWER"} and stride == (1, 1, 1):
        totals = [reach * (edge - 1) for reach, edge in zip(dilation, kernel, strict=True)]
        less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        pads = less + more if automatic == "SAME_UPPER" else more + less
    elif automatic not in {"NOTSET", "VALID"}:
        raise Refused(f"auto_pad: {automatic} with strides {stride} cannot be honoured; export it with pads.")
    return {"stride": stride, "dilation": dilation, "before": pads[:3], "after": pads[3:]}


def _constant(attributes: Mapping[str, Any]) -> Array:
    for key, kind in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if key in attributes:
            return np.array(attributes[key], kind)
    if not isinstance(attributes.get("value"), np.ndarray):
        raise Refused("value: of a kind that cannot be honoured.")
    array: Array = attributes["value"]
    return array


def _tensor(array: Array) -> Tensor:
    """A copy of its own; floating point as float32."""
    tensor = torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
    return tensor.float() if tensor.is_floating_point() else tensor
