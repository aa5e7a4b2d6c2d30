"""Convert ONNX files to torch modules, which every engine can run.

No ONNX runtime is used. Only the operators listed here and in `service.models.graphs.onnx.operators` are supported.
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
from service.models.graphs.batches import accept_any_batch
from service.models.graphs.graph_module import check_element_count, limit_sizes, make_graph_module
from service.models.graphs.layers import INPUT_RANK, add_layers, make_convolution
from service.models.graphs.onnx import file
from service.models.graphs.onnx.attributes import read_constant, read_settings, read_torch_mode, read_window
from service.models.graphs.onnx.elementwise import UnsupportedCall, Value, flatten_padding
from service.models.graphs.onnx.file import Model, Node, TensorInfo
from service.models.graphs.onnx.layers import ADDITIONS, LAYER_FINDERS
from service.models.graphs.onnx.operators import OPERATORS, resize, softmax_flattened
from service.models.graphs.outputs import OutputQuery, select_output

STANDARD_DOMAINS = {"", "ai.onnx"}
# Operators whose constant 1D inputs are passed to the call as numbers, not as tensors of the network.
OPERATORS_WITH_NUMERIC_INPUTS = {"Resize", "Upsample", "Pad", "Clip", "Range", "Reshape", "Expand"}
PASS_THROUGH_OPERATORS = {"Identity", "Dropout"}
# Maximum length of a constant 1D integer tensor whose elements become numbers in the code of the graph.
MAX_INLINED_NUMBERS = 64
# Maximum total number of elements of all tensors computed from constants while loading: 2 GiB as float32.
MAX_CONSTANT_ELEMENTS = 2**29
Ints = Sequence[int]
_BUILD_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AttributeError)


def load_onnx(path: Path, window: Sequence[int], query: OutputQuery | None = None) -> nn.Module:
    """Load the network of an `.onnx` file, in float32 on the CPU, in evaluation mode, for any number of windows.

    Layers are recognized by the shapes that their tensors have for a window [C, z, y, x]. Other windows work if the
    file allows them. `query` describes the output with the scores; by default, it is the first output. Raises
    BrokenModel with the reason if the file is rejected.
    """
    model = file.read_model(path)
    try:
        image = file.find_image(model)
        batch_size = image.shape[0] if image.shape is not None else None
        with torch.no_grad():
            builder = _NetworkBuilder(model)
            graph = select_output(builder.build(image), builder.output_names, window, query, batch_size or 1)
            layers = add_layers(graph, window, LAYER_FINDERS, ADDITIONS, batch_size or 1)
            network = accept_any_batch(OnnxNetwork(image, layers.float()).eval(), window, batch_size)
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except _BUILD_ERRORS as error:
        raise BrokenModel(f"{path}: the file cannot be converted to a network: {error}") from error
    return network.eval().requires_grad_(requires_grad=False)


class OnnxNetwork(nn.Module):
    """The network of an ONNX graph: image [B, C, z, y, x] -> scores [B, K, z, y, x].

    image  input of the graph; images must match its fixed sizes
    """

    def __init__(self, image: TensorInfo, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._shape = image.shape

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores of `x`. Raises ValueError for a shape that the file does not allow."""
        if self._shape is not None:
            size_matches = [
                fixed_length is None or fixed_length == length
                for fixed_length, length in zip(self._shape[1:], x.shape[1:], strict=True)
            ]
            if not all(size_matches):
                raise ValueError(f"the file accepts only inputs of shape {self._shape}")
        scores: Tensor = self.network(x)
        return scores


class _NetworkBuilder:
    """Builds a torch network from the nodes of an ONNX graph.

    _values             results by their names in the file: nodes if computed from the image, otherwise tensors, numbers
                        or tuples of numbers
    _tensor_nodes       nodes of constant tensors, by tensor
    _constant_elements  number of elements of all tensors computed from constants
    output_names        names of the outputs of the graph that are computed from the image
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._root, self._graph = nn.Module(), fx.Graph()
        self._values: dict[str, Value] = {name: _to_value(array) for name, array in model.tensors.items()}
        self._tensor_nodes: dict[Tensor, fx.Node] = {}
        self._constant_elements = 0
        self.output_names: tuple[str, ...] = ()

    def build(self, image: TensorInfo) -> fx.GraphModule:
        """Build the network. Raises BrokenModel if the graph is not supported."""
        if not self._model.outputs:
            raise BrokenModel("graph.output: the graph has no output.")
        self._values[image.name] = self._graph.placeholder("image")
        for node in self._model.nodes:
            if node.domain not in STANDARD_DOMAINS:
                raise BrokenModel(
                    f"{node.operator} from the domain {node.domain} is not a standard ONNX operator; "
                    "custom code is not supported."
                )
            try:
                self._add_node(node)
            except UnsupportedCall as error:
                raise BrokenModel(f"{node.operator}: {error}") from error
        outputs = {info.name: self._values.get(info.name) for info in self._model.outputs}
        self.output_names = tuple(name for name, value in outputs.items() if isinstance(value, fx.Node))
        if not self.output_names:
            raise BrokenModel(f"graph.output {self._model.outputs[0].name} is not computed from the image.")
        self._graph.output(tuple(outputs[name] for name in self.output_names))
        return make_graph_module(self._root, self._graph)

    def _add_node(self, node: Node) -> None:
        if node.operator == "Constant":
            self._values[node.outputs[0]] = _to_value(read_constant(node.attributes))
        elif node.operator in PASS_THROUGH_OPERATORS:
            if node.operator == "Dropout" and len(node.inputs) > 2 and self._get_value(node.inputs[2]):
                raise UnsupportedCall("training_mode: this input is set; export the network in evaluation mode.")
            self._values[node.outputs[0]] = self._get_value(node.inputs[0])
        elif node.operator in _BUILDERS:
            _BUILDERS[node.operator](self, node)
        elif node.operator == "Softmax" and self._model.opset < 13:
            self._add_call(node, softmax_flattened, node.attributes)
        elif node.operator in OPERATORS:
            self._add_call(node, OPERATORS[node.operator], node.attributes)
        else:
            raise BrokenModel(f"{node.operator} is not supported; see service/models/graphs/onnx/operators.py.")

    def _add_call(self, node: Node, function: Callable[..., Value], attributes: Mapping[str, Any]) -> None:
        """Add a call with the node's inputs, or compute the result now if it does not depend on the image."""
        settings = read_settings(function, attributes)
        arguments = [self._get_value(name) for name in node.inputs]
        if node.operator in OPERATORS_WITH_NUMERIC_INPUTS:
            arguments[1:] = [_to_numbers(argument) for argument in arguments[1:]]
        if any(isinstance(argument, fx.Node) for argument in arguments):
            result: Any = self._graph.call_function(function, tuple(map(self._to_argument, arguments)), settings)
        else:
            result = _compute_constant(function, arguments, settings)
            self._constant_elements += result.numel() if isinstance(result, Tensor) else 0
            if self._constant_elements > MAX_CONSTANT_ELEMENTS:
                raise UnsupportedCall(f"the constants of the graph have more than {MAX_CONSTANT_ELEMENTS} elements.")
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
            raise UnsupportedCall(f"{name}: this input is not defined.")
        return self._values[name] if name else None

    def _to_argument(self, value: Value) -> Any:
        """Return the node of a constant tensor, and other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._tensor_nodes:
            name = f"tensor_{len(self._tensor_nodes)}"
            self._root.register_buffer(name, value)
            self._tensor_nodes[value] = self._graph.get_attr(name)
        return self._tensor_nodes[value]

    def _get_weights(self, node: Node, index: int) -> Tensor | None:
        """Return a constant tensor of a layer, or None for an omitted input."""
        weights = self._get_value(node.inputs[index]) if index < len(node.inputs) else None
        if weights is not None and not isinstance(weights, Tensor):
            raise UnsupportedCall(f"input {index}: computed weights are not supported.")
        return weights

    def _require_weights(self, node: Node, index: int) -> Tensor:
        weights = self._get_weights(node, index)
        if weights is None:
            raise UnsupportedCall(f"input {index} is missing.")
        return weights

    def _add_layer(self, node: Node, module: nn.Module, padding: Sequence[int] = (), value: float = 0.0) -> None:
        """Add a module, preceded by constant padding in the order of `functional.pad`."""
        source = self._get_value(node.inputs[0])
        if not isinstance(source, fx.Node):
            raise UnsupportedCall("input 0 is not computed from the image.")
        if any(padding):
            module = nn.Sequential(nn.ConstantPad3d(tuple(padding), value), module)  # type: ignore[arg-type]
        name = f"layer_{len(self._graph.nodes)}"
        self._root.add_module(name, module)
        self._values[node.outputs[0]] = self._graph.call_module(name, (source,))

    def _add_convolution(self, node: Node) -> None:
        weight, bias = self._require_weights(node, 1), self._get_weights(node, 2)
        if weight.dim() != INPUT_RANK:
            raise UnsupportedCall(
                f"W: the weights have {weight.dim() - 2} spatial axes; exactly three (z, y, x) are required."
            )
        is_transposed = node.operator == "ConvTranspose"
        settings = read_window(node.attributes, tuple(weight.shape[2:]))
        if is_transposed:
            if "output_shape" in node.attributes:
                raise UnsupportedCall(
                    "output_shape: this attribute is not supported; export the network with output_padding instead."
                )
            settings["output_padding"] = node.attributes.get("output_padding", (0, 0, 0))
        start_padding, end_padding = settings.pop("start_padding"), settings.pop("end_padding")
        is_symmetric = start_padding == end_padding
        if is_transposed and not is_symmetric:
            raise UnsupportedCall("pads: different padding at the start and end of an axis is not supported.")
        settings |= {"groups": int(node.attributes.get("group", 1)), "padding": start_padding if is_symmetric else 0}
        module = make_convolution(weight, bias, transposed=is_transposed, **settings)
        self._add_layer(
            node, module, () if is_symmetric else flatten_padding(zip(start_padding, end_padding, strict=True))
        )

    def _add_batch_norm(self, node: Node) -> None:
        if node.attributes.get("training_mode"):
            raise UnsupportedCall("training_mode: this attribute is set; export the network in evaluation mode.")
        scale, bias, mean, variance = (self._require_weights(node, index) for index in range(1, 5))
        module = nn.BatchNorm3d(len(mean), eps=node.attributes.get("epsilon", 1e-5))
        module.load_state_dict(
            {"weight": scale, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False
        )
        self._add_layer(node, module)

    def _add_pooling(self, node: Node) -> None:
        attributes = dict(node.attributes)
        kernel = attributes.pop("kernel_shape")
        counts_padding = bool(attributes.pop("count_include_pad", 0))
        settings = read_window(attributes, kernel)
        start_padding, end_padding = settings.pop("start_padding"), settings.pop("end_padding")
        settings["ceil_mode"] = bool(attributes.get("ceil_mode", 0))
        if node.operator == "MaxPool":
            self._add_max_pooling(node, {"kernel_size": kernel, **settings}, start_padding, end_padding)
            return
        if settings.pop("dilation") != (1, 1, 1) or start_padding != end_padding:
            raise UnsupportedCall("dilations, pads: these values are not supported.")
        self._add_layer(node, nn.AvgPool3d(kernel, padding=start_padding, count_include_pad=counts_padding, **settings))

    def _add_max_pooling(self, node: Node, settings: dict[str, Any], start_padding: Ints, end_padding: Ints) -> None:
        if settings["ceil_mode"] and any(end_padding):
            # No window may start in the padding at the end, which torch ensures only for its own, symmetric padding.
            is_large = any(2 * n > length for n, length in zip(end_padding, settings["kernel_size"], strict=True))
            if start_padding != end_padding or is_large:
                raise UnsupportedCall("ceil_mode, pads: this combination is not supported; export without ceil_mode.")
            settings["padding"], start_padding, end_padding = end_padding, (0, 0, 0), (0, 0, 0)
        # Pad with -inf, so that padded voxels are never the maximum.
        padding = flatten_padding(zip(start_padding, end_padding, strict=True))
        self._add_layer(node, nn.MaxPool3d(**settings), padding, -math.inf)

    def _add_resize(self, node: Node) -> None:
        is_legacy = node.operator == "Upsample" or self._model.opset < 11
        torch_mode = read_torch_mode(node.attributes, is_legacy=is_legacy)
        inputs = (node.inputs[0], "", *node.inputs[1:]) if is_legacy else node.inputs
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
    """Call a function on constant values. Raises BrokenModel or UnsupportedCall if the result is too large."""
    try:
        result = function(
            *(argument.to("meta") if isinstance(argument, Tensor) else argument for argument in arguments), **settings
        )
        if isinstance(result, Tensor):
            check_element_count(result.shape)
    except UnsupportedCall:
        raise
    except _BUILD_ERRORS:
        # The function needs the values of tensors and cannot run on the meta device.
        with limit_sizes():
            return function(*arguments, **settings)
    return function(*arguments, **settings)


def _to_value(value: Any) -> Value:
    """Convert an array or tensor to a number or tuple if it may be a size, and floating-point tensors to float32."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.item()
    if value.is_floating_point():
        return value.float()
    return tuple(value.tolist()) if value.dim() == 1 and len(value) <= MAX_INLINED_NUMBERS else value


def _to_numbers(value: Value) -> Value:
    """Return a constant 1D tensor as a tuple, and other values unchanged."""
    return tuple(value.tolist()) if isinstance(value, Tensor) and value.dim() == 1 else value
