"""ONNX file -> torch module, which every engine runs like any other.

No runtime of ONNX is involved. Only the operators listed here and in `service.models.onnx.operators` are run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.core.volume import Array
from service.models.convolution import make_convolution
from service.models.onnx import file
from service.models.onnx.elementwise import UnsupportedCall, Value
from service.models.onnx.file import Model, Node, TensorInfo
from service.models.onnx.operators import OPERATORS, average_pool, flatten_padding, max_pool, resize, softmax_flattened

STANDARD_DOMAINS = {"", "ai.onnx"}
INPUT_RANK = 5
# Operators whose stored inputs with one axis are numbers for the call, not tensors of the network.
NUMERIC_INPUTS = {"Resize", "Upsample", "Pad", "Clip", "Range", "Reshape", "Expand"}
IGNORED_ATTRIBUTES = {"ratio", "seed", "saturate", "stash_type"}
# Mode, coordinate transformation and rounding of ONNX -> mode of `functional.interpolate` that samples the same points.
TORCH_MODES = {
    ("nearest", "asymmetric", "floor"): "nearest",
    ("nearest", "half_pixel", "round_prefer_floor"): "nearest-exact",
    ("nearest", "half_pixel", "round_prefer_ceil"): "nearest-exact",
    ("linear", "half_pixel"): "trilinear",
    ("linear", "pytorch_half_pixel"): "trilinear",
    ("linear", "align_corners"): "corners",
}
_DAMAGE = (ValueError, TypeError, IndexError, KeyError, RuntimeError)


def load_onnx(path: Path) -> nn.Module:
    """Load the network of an `.onnx` file, float32 on the CPU, in evaluation mode.

    A file whose batch axis is fixed to one is run window by window. Raise BrokenModel, naming what is refused.
    """
    model = file.read(path)
    try:
        network = _NetworkBuilder(model).build(find_image(model))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise BrokenModel(f"{path}: cannot be made a network of: {error}") from error
    return network.eval().requires_grad_(requires_grad=False)


def find_image(model: Model) -> TensorInfo:
    """Return the only input, [batch, channel, z, y, x] of floating point. Raise BrokenModel for any other."""
    if len(model.inputs) != 1:
        raise BrokenModel(f"graph.input: it takes {len(model.inputs)} inputs; exactly one image can be given.")
    (image,) = model.inputs
    if image.shape is not None and len(image.shape) != INPUT_RANK:
        raise BrokenModel(
            f"graph.input {image.name}: {len(image.shape)} axes; only batch, channel, z, y, x can be honoured."
        )
    if image.dtype not in file.FLOATING_POINT:
        raise BrokenModel(f"graph.input {image.name}: data type {image.dtype}; only floating point can be honoured.")
    if image.shape is not None and image.shape[0] not in {None, 1}:
        raise BrokenModel(
            f"graph.input {image.name}: a batch of {image.shape[0]}; export it with one window, or any number."
        )
    return image


class Argument(NamedTuple):
    """An input of a step: the name of a "value", the attribute that holds a "tensor" of the file, or a "number"."""

    kind: str
    content: Any


@dataclass(frozen=True)
class Step:
    """A call of a function, or of the layer with that number. `released` names values that no later step needs."""

    operator: str
    function: Callable[..., Value] | int
    inputs: tuple[Argument, ...]
    settings: Mapping[str, Any]
    outputs: tuple[str, ...]
    released: tuple[str, ...] = ()


class OnnxNetwork(nn.Module):
    """Network that runs the steps of a graph: image [B, C, z, y, x] -> first output, scores [B, K, z, y, x].

    image   input of the graph; sizes that it states are the only ones that the network takes
    result  name of the output
    """

    def __init__(
        self, image: TensorInfo, result: str, layers: Sequence[nn.Module], tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.steps: tuple[Step, ...] = ()
        self._image, self._shape, self._result = image.name, image.shape, result
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of `x`. Raise ValueError for a shape or a step that the file does not allow for."""
        if self._shape is not None:
            fits = [edge is None or edge == length for edge, length in zip(self._shape[1:], x.shape[1:], strict=True)]
            if not all(fits):
                raise ValueError(f"the file fixes its input to {self._shape}")
            if self._shape[0] == 1 and len(x) > 1:
                return torch.cat([self._run(window[None]) for window in x.unbind(0)])
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        values: dict[str, Value] = {self._image: x}
        for step in self.steps:
            inputs = [self._get_argument(argument, values) for argument in step.inputs]
            function = self.layers[step.function] if isinstance(step.function, int) else step.function
            result = function(*inputs, **step.settings)
            results = result if step.operator == "Split" else (result,)
            values.update(zip(step.outputs, results, strict=True))
            for name in step.released:
                del values[name]
        scores: Tensor = values[self._result]
        return scores

    def _get_argument(self, argument: Argument, values: Mapping[str, Value]) -> Value:
        if argument.kind == "value":
            return values[argument.content]
        return getattr(self, argument.content) if argument.kind == "tensor" else argument.content


class _NetworkBuilder:
    """Builder of one network. `_computed` holds the names of values that an earlier step computes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._constants = dict(model.tensors)
        self._layers: list[nn.Module] = []
        self._tensors: dict[str, Tensor] = {}
        self._attributes: dict[str, str] = {}
        self._computed: set[str] = set()

    def build(self, image: TensorInfo) -> OnnxNetwork:
        """Build the network. Raise BrokenModel."""
        if not self._model.outputs:
            raise BrokenModel("graph.output: nothing comes out of it.")
        result = self._model.outputs[0].name
        self._computed.add(image.name)
        steps = []
        for node in self._model.nodes:
            if node.domain not in STANDARD_DOMAINS:
                raise BrokenModel(
                    f"{node.operator} of {node.domain} is not an operator of ONNX; no code of others is run."
                )
            try:
                step = self._make_step(node)
            except UnsupportedCall as error:
                raise BrokenModel(f"{node.operator}: {error}") from error
            if step is not None:
                steps.append(step)
                self._computed |= set(step.outputs)
        if result not in self._computed:
            raise BrokenModel(f"graph.output {result}: nothing makes it.")
        network = OnnxNetwork(image, result, self._layers, self._tensors)
        network.steps = _release_values(steps, result)
        return network

    def _make_step(self, node: Node) -> Step | None:
        if node.operator == "Constant":
            self._constants[node.outputs[0]] = _read_constant(node.attributes)
            return None
        if node.operator == "Identity" and node.inputs[0] in self._constants:
            # Exporters store equal weights once and give them further names by Identity.
            self._constants[node.outputs[0]] = self._constants[node.inputs[0]]
            return None
        special = _BUILDERS.get(node.operator)
        if special is not None:
            return special(self, node)
        function = (
            softmax_flattened if node.operator == "Softmax" and self._model.opset < 13 else OPERATORS.get(node.operator)
        )
        if function is None:
            raise BrokenModel(f"{node.operator} is not on the list in service/models/onnx/operators.py.")
        return self._make_call(node, function, node.attributes)

    def _make_call(
        self, node: Node, function: Callable[..., Value] | int, settings: Mapping[str, Any], inputs: int | None = None
    ) -> Step:
        """Return the call of a function with the node's inputs, or of a layer with the first of them."""
        settings = {name: value for name, value in settings.items() if name not in IGNORED_ATTRIBUTES}
        if not isinstance(function, int):
            parameters = inspect.signature(function).parameters.values()
            unknown = settings.keys() - {parameter.name for parameter in parameters}
            if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                raise UnsupportedCall(f"{min(unknown)}: cannot be honoured.")
        arguments = tuple(self._make_argument(node, name) for name in node.inputs[:inputs])
        outputs = node.outputs if node.operator == "Split" else node.outputs[:1]
        return Step(node.operator, function, arguments, settings, outputs)

    def _make_argument(self, node: Node, name: str) -> Argument:
        if not name:
            return Argument("number", None)
        if name in self._computed:
            return Argument("value", name)
        array = self._constants.get(name)
        if array is None:
            raise UnsupportedCall(f"{name}: nothing makes it.")
        if array.ndim == 0 or (array.ndim == 1 and (array.dtype.kind != "f" or node.operator in NUMERIC_INPUTS)):
            return Argument("number", tuple(array.tolist()) if array.ndim else array.item())
        if name not in self._attributes:
            self._attributes[name] = f"tensor_{len(self._tensors)}"
            self._tensors[self._attributes[name]] = _to_tensor(array)
        return Argument("tensor", self._attributes[name])

    def _get_weights(self, node: Node, index: int) -> Tensor | None:
        """Return a stored tensor of a layer; None for an input that is left out."""
        name = node.inputs[index] if index < len(node.inputs) else ""
        if not name:
            return None
        if name not in self._constants:
            raise UnsupportedCall(f"input {index}: weights that are computed cannot be honoured.")
        return _to_tensor(self._constants[name])

    def _require_weights(self, node: Node, index: int) -> Tensor:
        weights = self._get_weights(node, index)
        if weights is None:
            raise UnsupportedCall(f"input {index}: is left out.")
        return weights

    def _add_layer(self, node: Node, module: nn.Module) -> Step:
        self._layers.append(module)
        return self._make_call(node, len(self._layers) - 1, {}, inputs=1)

    def _add_convolution(self, node: Node) -> Step:
        weight, bias = self._require_weights(node, 1), self._get_weights(node, 2)
        if weight.dim() != INPUT_RANK:
            raise UnsupportedCall(f"W: {weight.dim() - 2} axes in space; only networks of z, y and x can be honoured.")
        transposed = node.operator == "ConvTranspose"
        settings = _read_window(node.attributes, tuple(weight.shape[2:]))
        if transposed:
            if "output_shape" in node.attributes:
                raise UnsupportedCall("output_shape: cannot be honoured; export it with output_padding.")
            settings["output_padding"] = node.attributes.get("output_padding", (0, 0, 0))
        before, after = settings.pop("before"), settings.pop("after")
        symmetric = before == after
        if transposed and not symmetric:
            raise UnsupportedCall("pads: before and after an axis differ.")
        settings |= {"groups": int(node.attributes.get("group", 1)), "padding": before if symmetric else 0}
        module = make_convolution(weight, bias, transposed=transposed, **settings)
        if symmetric:
            return self._add_layer(node, module)
        padding: Any = tuple(flatten_padding(zip(before, after, strict=True)))
        return self._add_layer(node, nn.Sequential(nn.ConstantPad3d(padding, 0.0), module))

    def _add_batch_norm(self, node: Node) -> Step:
        if node.attributes.get("training_mode"):
            raise UnsupportedCall("training_mode: export the network in evaluation mode.")
        scale, bias, mean, variance = (self._require_weights(node, index) for index in range(1, 5))
        module = nn.BatchNorm3d(len(mean), eps=node.attributes.get("epsilon", 1e-5))
        module.load_state_dict(
            {"weight": scale, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False
        )
        return self._add_layer(node, module)

    def _make_pooling(self, node: Node) -> Step:
        attributes = dict(node.attributes)
        kernel = attributes.pop("kernel_shape")
        count_include_pad = bool(attributes.pop("count_include_pad", 0))
        settings = _read_window(attributes, kernel)
        before, after = settings.pop("before"), settings.pop("after")
        settings |= {"kernel_size": kernel, "ceil_mode": bool(attributes.get("ceil_mode", 0))}
        if node.operator == "AveragePool":
            if settings.pop("dilation") != (1, 1, 1) or before != after:
                raise UnsupportedCall("dilations or pads: cannot be honoured.")
            return self._make_call(
                node, average_pool, settings | {"padding": before, "count_include_pad": count_include_pad}
            )
        padding = flatten_padding(zip(before, after, strict=True))
        return self._make_call(node, max_pool, settings | {"padding": padding})

    def _make_resize(self, node: Node) -> Step:
        attributes = dict(node.attributes)
        legacy = node.operator == "Upsample" or self._model.opset < 11
        coordinates = str(attributes.get("coordinate_transformation_mode", "asymmetric" if legacy else "half_pixel"))
        mode = str(attributes.get("mode", "nearest"))
        rounding = str(attributes.get("nearest_mode", "floor" if legacy else "round_prefer_floor"))
        if attributes.get("antialias") or "axes" in attributes:
            raise UnsupportedCall("antialias or axes: cannot be honoured.")
        torch_mode = TORCH_MODES.get((mode, coordinates, rounding) if mode == "nearest" else (mode, coordinates))
        if torch_mode is None:
            raise UnsupportedCall(f"mode: {mode} with {coordinates}, {rounding} cannot be honoured.")
        inputs = (node.inputs[0], "", *node.inputs[1:]) if legacy else node.inputs
        return self._make_call(Node("Resize", "", inputs, node.outputs, {}), resize, {"torch_mode": torch_mode})


_BUILDERS: dict[str, Callable[[_NetworkBuilder, Node], Step]] = {
    "Conv": _NetworkBuilder._add_convolution,
    "ConvTranspose": _NetworkBuilder._add_convolution,
    "BatchNormalization": _NetworkBuilder._add_batch_norm,
    "MaxPool": _NetworkBuilder._make_pooling,
    "AveragePool": _NetworkBuilder._make_pooling,
    "Resize": _NetworkBuilder._make_resize,
    "Upsample": _NetworkBuilder._make_resize,
}


def _release_values(steps: Sequence[Step], result: str) -> tuple[Step, ...]:
    """Return the steps, each releasing the values that no later one needs; all values take many times the memory."""
    needed = {result}
    releasing = []
    for step in reversed(steps):
        used = {argument.content for argument in step.inputs if argument.kind == "value"} | set(step.outputs)
        releasing.append(replace(step, released=tuple(sorted(used - needed))))
        needed |= used
    return tuple(reversed(releasing))


def _read_window(attributes: Mapping[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
    """Return stride, dilation, and voxels of padding before and after each axis."""
    if len(kernel) != 3:
        raise UnsupportedCall(
            f"kernel_shape: {tuple(kernel)}; only networks of volumes, with z, y and x, can be honoured."
        )
    stride, dilation = (tuple(attributes.get(key, (1, 1, 1))) for key in ("strides", "dilations"))
    pads = tuple(attributes.get("pads", (0,) * 6))
    automatic = attributes.get("auto_pad", "NOTSET")
    if automatic in {"SAME_UPPER", "SAME_LOWER"} and stride == (1, 1, 1):
        totals = [rate * (edge - 1) for rate, edge in zip(dilation, kernel, strict=True)]
        smaller, larger = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        pads = smaller + larger if automatic == "SAME_UPPER" else larger + smaller
    elif automatic not in {"NOTSET", "VALID"}:
        raise UnsupportedCall(f"auto_pad: {automatic} with strides {stride} cannot be honoured; export it with pads.")
    return {"stride": stride, "dilation": dilation, "before": pads[:3], "after": pads[3:]}


def _read_constant(attributes: Mapping[str, Any]) -> Array:
    for key in ("value_int", "value_ints", "value_float", "value_floats"):
        if key in attributes:
            return np.array(attributes[key], np.int64 if "int" in key else np.float32)
    if not isinstance(attributes.get("value"), np.ndarray):
        raise UnsupportedCall("value: of a kind that cannot be honoured.")
    array: Array = attributes["value"]
    return array


def _to_tensor(array: Array) -> Tensor:
    """Return a copy as a tensor, floating point as float32."""
    tensor = torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))
    return tensor.float() if tensor.is_floating_point() else tensor
