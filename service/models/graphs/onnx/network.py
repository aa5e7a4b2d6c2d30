"""ONNX file -> torch module, which every engine runs like any other.

No runtime of ONNX is involved. Only the operators listed here and in `service.models.graphs.onnx.operators` are run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from service.core.errors import BrokenModel
from service.models.graphs.graph_module import check_elements, limit_sizes, make_graph_module
from service.models.graphs.layers import INPUT_RANK, add_layers, make_convolution
from service.models.graphs.onnx import file
from service.models.graphs.onnx.attributes import read_constant, read_settings, read_torch_mode, read_window
from service.models.graphs.onnx.elementwise import UnsupportedCall, Value, flatten_padding
from service.models.graphs.onnx.file import Model, Node, TensorInfo
from service.models.graphs.onnx.layers import ADDITIONS, FINDERS
from service.models.graphs.onnx.operators import OPERATORS, resize, softmax_flattened

STANDARD_DOMAINS = {"", "ai.onnx"}
# Operators whose stored inputs with one axis are numbers for the call, not tensors of the network.
NUMERIC_INPUTS = {"Resize", "Upsample", "Pad", "Clip", "Range", "Reshape", "Expand"}
UNCHANGED = {"Identity", "Dropout"}
# Stored whole numbers along one axis up to so many are numbers in the code of the graph.
INLINED_NUMBERS = 64
# Most elements of all tensors that are computed while a file is loaded, of those that it stores: 2 GiB as float32.
MAX_CONSTANTS = 2**29
_DAMAGE = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


def load_onnx(path: Path, window: Sequence[int]) -> nn.Module:
    """Load the network of an `.onnx` file, float32 on the CPU, in evaluation mode, for windows [C, z, y, x].

    It takes other windows, too, where the file does; layers are found by what they do to that one.
    A file whose batch axis is fixed to one is run window by window. Raise BrokenModel, naming what is refused.
    """
    model = file.read(path)
    try:
        image = file.find_image(model)
        with torch.no_grad():
            network = OnnxNetwork(image, add_layers(_NetworkBuilder(model).build(image), window, FINDERS, ADDITIONS))
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise BrokenModel(f"{path}: cannot be made a network of: {error}") from error
    return network.eval().requires_grad_(requires_grad=False)


class OnnxNetwork(nn.Module):
    """Network of a graph: image [B, C, z, y, x] -> first output, scores [B, K, z, y, x].

    image  input of the graph; sizes that it states are the only ones that the network takes
    """

    def __init__(self, image: TensorInfo, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._shape = image.shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of `x`. Raise ValueError for a shape or a step that the file does not allow for."""
        if self._shape is not None:
            fits = [edge is None or edge == length for edge, length in zip(self._shape[1:], x.shape[1:], strict=True)]
            if not all(fits):
                raise ValueError(f"the file fixes its input to {self._shape}")
            if self._shape[0] == 1 and len(x) > 1:
                return torch.cat([self.network(window[None]) for window in x.unbind(0)])
        scores: Tensor = self.network(x)
        return scores


class _NetworkBuilder:
    """Builder of one network.

    _values   results by their names in the file: nodes of what is computed from the image; else tensors, numbers or
              tuples of numbers
    _tensors  nodes that hold stored tensors, by these
    _constants  elements of tensors that were computed of stored ones
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._root, self._graph = nn.Module(), fx.Graph()
        self._values: dict[str, Value] = {name: _to_value(array) for name, array in model.tensors.items()}
        self._tensors: dict[Tensor, fx.Node] = {}
        self._constants = 0

    def build(self, image: TensorInfo) -> fx.GraphModule:
        """Build the network. Raise BrokenModel."""
        if not self._model.outputs:
            raise BrokenModel("graph.output: nothing comes out of it.")
        self._values[image.name] = self._graph.placeholder("image")
        for node in self._model.nodes:
            if node.domain not in STANDARD_DOMAINS:
                raise BrokenModel(
                    f"{node.operator} of {node.domain} is not an operator of ONNX; no code of others is run."
                )
            try:
                self._add_node(node)
            except UnsupportedCall as error:
                raise BrokenModel(f"{node.operator}: {error}") from error
        scores = self._values.get(self._model.outputs[0].name)
        if not isinstance(scores, fx.Node):
            raise BrokenModel(f"graph.output {self._model.outputs[0].name}: nothing makes it of the image.")
        self._graph.output(scores)
        return make_graph_module(self._root, self._graph)

    def _add_node(self, node: Node) -> None:
        if node.operator == "Constant":
            self._values[node.outputs[0]] = _to_value(read_constant(node.attributes))
        elif node.operator in UNCHANGED:
            self._values[node.outputs[0]] = self._get_value(node.inputs[0])
        elif node.operator in _BUILDERS:
            _BUILDERS[node.operator](self, node)
        elif node.operator == "Softmax" and self._model.opset < 13:
            self._add_call(node, softmax_flattened, node.attributes)
        elif node.operator in OPERATORS:
            self._add_call(node, OPERATORS[node.operator], node.attributes)
        else:
            raise BrokenModel(f"{node.operator} is not on the list in service/models/graphs/onnx/operators.py.")

    def _add_call(self, node: Node, function: Callable[..., Value], attributes: Mapping[str, Any]) -> None:
        """Add the call of a function with the node's inputs, or call it at once where no pixel is among them."""
        settings = read_settings(function, attributes)
        arguments = [self._get_value(name) for name in node.inputs]
        if node.operator in NUMERIC_INPUTS:
            arguments[1:] = [_to_numbers(argument) for argument in arguments[1:]]
        if any(isinstance(argument, fx.Node) for argument in arguments):
            result: Any = self._graph.call_function(function, tuple(map(self._to_argument, arguments)), settings)
        else:
            result = _compute_constant(function, arguments, settings)
            self._constants += result.numel() if isinstance(result, Tensor) else 0
            if self._constants > MAX_CONSTANTS:
                raise UnsupportedCall(f"its constants have more than {MAX_CONSTANTS} elements.")
        parts = [result]
        if node.operator == "Split":
            parts = [self._get_part(result, index) for index in range(len(node.outputs))]
        self._values.update(zip(node.outputs, map(_to_value, parts), strict=False))

    def _get_part(self, parts: Any, index: int) -> Any:
        return (
            self._graph.call_function(operator.getitem, (parts, index)) if isinstance(parts, fx.Node) else parts[index]
        )

    def _get_value(self, name: str) -> Value:
        if name and name not in self._values:
            raise UnsupportedCall(f"{name}: nothing makes it.")
        return self._values[name] if name else None

    def _to_argument(self, value: Value) -> Any:
        """Return a node that holds a stored tensor, and other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._tensors:
            name = f"tensor_{len(self._tensors)}"
            self._root.register_buffer(name, value)
            self._tensors[value] = self._graph.get_attr(name)
        return self._tensors[value]

    def _get_weights(self, node: Node, index: int) -> Tensor | None:
        """Return a stored tensor of a layer; None for an input that is left out."""
        weights = self._get_value(node.inputs[index]) if index < len(node.inputs) else None
        if weights is not None and not isinstance(weights, Tensor):
            raise UnsupportedCall(f"input {index}: weights that are computed cannot be honoured.")
        return weights

    def _require_weights(self, node: Node, index: int) -> Tensor:
        weights = self._get_weights(node, index)
        if weights is None:
            raise UnsupportedCall(f"input {index}: is left out.")
        return weights

    def _add_layer(self, node: Node, module: nn.Module, padding: Sequence[int] = (), value: float = 0.0) -> None:
        """Add a module, after padding in the order of `functional.pad`."""
        source = self._get_value(node.inputs[0])
        if not isinstance(source, fx.Node):
            raise UnsupportedCall("input 0: is not computed from the image.")
        if any(padding):
            module = nn.Sequential(nn.ConstantPad3d(tuple(padding), value), module)  # type: ignore[arg-type]
        name = f"layer_{len(self._graph.nodes)}"
        self._root.add_module(name, module)
        self._values[node.outputs[0]] = self._graph.call_module(name, (source,))

    def _add_convolution(self, node: Node) -> None:
        weight, bias = self._require_weights(node, 1), self._get_weights(node, 2)
        if weight.dim() != INPUT_RANK:
            raise UnsupportedCall(f"W: {weight.dim() - 2} axes in space; only networks of z, y and x can be honoured.")
        transposed = node.operator == "ConvTranspose"
        settings = read_window(node.attributes, tuple(weight.shape[2:]))
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
        self._add_layer(node, module, () if symmetric else flatten_padding(zip(before, after, strict=True)))

    def _add_batch_norm(self, node: Node) -> None:
        if node.attributes.get("training_mode"):
            raise UnsupportedCall("training_mode: export the network in evaluation mode.")
        scale, bias, mean, variance = (self._require_weights(node, index) for index in range(1, 5))
        module = nn.BatchNorm3d(len(mean), eps=node.attributes.get("epsilon", 1e-5))
        module.load_state_dict(
            {"weight": scale, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False
        )
        self._add_layer(node, module)

    def _add_pooling(self, node: Node) -> None:
        attributes = dict(node.attributes)
        kernel = attributes.pop("kernel_shape")
        include_padding = bool(attributes.pop("count_include_pad", 0))
        settings = read_window(attributes, kernel)
        before, after = settings.pop("before"), settings.pop("after")
        settings["ceil_mode"] = bool(attributes.get("ceil_mode", 0))
        if node.operator == "MaxPool":
            # Padded voxels are never a maximum.
            padding = flatten_padding(zip(before, after, strict=True))
            self._add_layer(node, nn.MaxPool3d(kernel, **settings), padding, -math.inf)
            return
        if settings.pop("dilation") != (1, 1, 1) or before != after:
            raise UnsupportedCall("dilations or pads: cannot be honoured.")
        self._add_layer(node, nn.AvgPool3d(kernel, padding=before, count_include_pad=include_padding, **settings))

    def _add_resize(self, node: Node) -> None:
        legacy = node.operator == "Upsample" or self._model.opset < 11
        torch_mode = read_torch_mode(node.attributes, legacy=legacy)
        inputs = (node.inputs[0], "", *node.inputs[1:]) if legacy else node.inputs
        self._add_call(Node("Resize", "", inputs, node.outputs, {}), resize, {"torch_mode": torch_mode})


_BUILDERS: dict[str, Callable[[_NetworkBuilder, Node], None]] = {
    "Conv": _NetworkBuilder._add_convolution,
    "ConvTranspose": _NetworkBuilder._add_convolution,
    "BatchNormalization": _NetworkBuilder._add_batch_norm,
    "MaxPool": _NetworkBuilder._add_pooling,
    "AveragePool": _NetworkBuilder._add_pooling,
    "Resize": _NetworkBuilder._add_resize,
    "Upsample": _NetworkBuilder._add_resize,
}


def _compute_constant(function: Callable[..., Value], arguments: Sequence[Value], settings: Mapping[str, Any]) -> Value:
    """Call a function of stored tensors and numbers. Raise BrokenModel or UnsupportedCall for a too large result."""
    try:
        result = function(*(each.to("meta") if isinstance(each, Tensor) else each for each in arguments), **settings)
        if isinstance(result, Tensor):
            check_elements(result.shape)
    except UnsupportedCall:
        raise
    except _DAMAGE:
        # It needs the numbers.
        with limit_sizes():
            return function(*arguments, **settings)
    return function(*arguments, **settings)


def _to_value(value: Any) -> Value:
    """Return an array or tensor as a number or a tuple where it is a size, floating point as float32."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.item()
    if value.is_floating_point():
        return value.float()
    return tuple(value.tolist()) if value.dim() == 1 and len(value) <= INLINED_NUMBERS else value


def _to_numbers(value: Value) -> Value:
    """Return a stored tensor with one axis as a tuple, and other values unchanged."""
    return tuple(value.tolist()) if isinstance(value, Tensor) and value.dim() == 1 else value
