"""Load a `torch.export` file without `torch.export.load`, which evaluates and unpickles parts of the file.

Only the graph, which is JSON with a list of operator calls, and the raw bytes of the weights are read. Every operator
must be on the allowlist in `allowed_operators`. The format is schema version 8 of `torch._export.serde.schema`, in the
PT2 archive that `torch.export.save` has written since torch 2.8.
"""

from __future__ import annotations

import json
import operator
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from service.core.errors import BrokenModel
from service.core.files.zip_archive import open_torch_archive
from service.models.graphs.aten_operators import (
    ASSERTIONS,
    BLOCKS,
    CONVERSIONS,
    COPY,
    SIZE_FUNCTIONS,
    TYPE_AS,
    ZEROS,
    convert,
    convert_copy,
    find_operator,
    make_zeros,
)
from service.models.graphs.batches import accept_any_batch
from service.models.graphs.graph_module import Shapes, make_graph_module
from service.models.graphs.layers import (
    Layer,
    LayerFinder,
    add_layers,
    find_activation,
    find_norm,
    find_prelu,
    get_first_input,
    is_volume,
    make_convolution,
    make_shuffle_finder,
    read_arguments,
)
from service.models.graphs.outputs import OutputQuery, select_output
from service.models.graphs.pt2_archive import DTYPES, Pt2Archive, decode_tensor, name_outputs

SCHEMA_VERSION = 8
PLAIN_ARGUMENT_KINDS = ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string")
# Devices and memory formats, which the engine chooses.
IGNORED_ARGUMENT_KINDS = ("as_device", "as_layout", "as_memory_format")
# Errors that reading a damaged or unrelated file can raise.
_READ_ERRORS = (
    AttributeError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    OSError,
    zipfile.BadZipFile,
)


def load_torch_export(path: Path, window: Sequence[int], query: OutputQuery | None = None) -> nn.Module:
    """Load the network of a `.pt2` file, in float32 on the CPU, in evaluation mode, for any number of windows.

    Layers become modules, which engines can replace. Layers are recognized by the shapes that their tensors have for a
    window [C, z, y, x]. `query` describes the output with the scores; by default, it is the first output. Raises
    BrokenModel with the reason if the file is rejected.
    """
    try:
        with open_torch_archive(path) as archive:
            reader = _GraphReader(Pt2Archive(archive))
            graph = reader.read()
        graph = select_output(graph, reader.output_names, window, query, reader.batch_size or 1)
        layers = add_layers(graph, window, LAYER_FINDERS, {_ATEN_OPS.add.Tensor}, reader.batch_size or 1)
        network = accept_any_batch(layers.float().eval(), window, reader.batch_size)
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except RecursionError as error:
        raise BrokenModel(f"{path}: the graph is nested too deeply.") from error
    except _READ_ERRORS as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"{path}: the file cannot be read as a torch.export file: {reason[0]}") from error
    return network.eval().requires_grad_(requires_grad=False)


class _GraphReader:
    """Reads the graph of a `torch.export` file, and converts it to a `torch.fx` graph.

    _values           nodes by their names in the file
    _tensor_nodes     nodes of constant tensors by file and metadata, since several names may refer to one tensor
    _remaining_bytes  bytes of tensors that may still be read; the total is limited to the size of the archive
    _configs          tables with the locations of tensors in the archive, by file name

    batch_size    batch size of the image for which the graph was exported, or None if it is variable
    output_names  names of the outputs of the graph
    """

    def __init__(self, archive: Pt2Archive) -> None:
        self._archive = archive
        program = archive.read_json("models/model.json")
        if (version := program["schema_version"]["major"]) != SCHEMA_VERSION:
            raise BrokenModel(f"the schema version is {version}; only version {SCHEMA_VERSION} is supported.")
        self._program: Mapping[str, Any] = program
        self._description: Mapping[str, Any] = program["graph_module"]["graph"]
        self._signature: Mapping[str, Any] = program["graph_module"]["signature"]
        self._root = nn.Module()
        self._graph = Graph()
        self._values: dict[str, Any] = {}
        self._tensor_nodes: dict[str, Node] = {}
        self._remaining_bytes = archive.stored_bytes
        self._configs: dict[str, Any] = {}
        # Names of operators that modify a tensor end with an underscore.
        self._modifies_tensors = (
            re.search(r'"torch\.ops\.aten\.\w+_\.', json.dumps(program["graph_module"])) is not None
        )
        self.batch_size: int | None = None
        self.output_names: tuple[str, ...] = ()

    def read(self) -> GraphModule:
        """Return the network. Raises BrokenModel if the graph is not supported."""
        self._read_inputs()
        for call in self._description["nodes"]:
            self._read_call(call)
        outputs = self._find_outputs()
        self.output_names = tuple(outputs)
        self._graph.output(tuple(self._values[name] for name in outputs.values()))
        return make_graph_module(self._root, self._graph)

    def _read_inputs(self) -> None:
        """Add the image as the input of the graph. All other inputs must be tensors in the file."""
        image_count = 0
        for spec in self._signature["input_specs"]:
            ((kind, content),) = spec.items()
            if kind == "user_input":
                image_count += 1
                name = content["arg"]["as_tensor"]["name"]
                self._image = self._values[name] = self._graph.placeholder(f"image_{image_count}")
                self.batch_size = self._description["tensor_values"][name]["sizes"][0].get("as_int")
            elif kind in {"parameter", "buffer", "tensor_constant"}:
                # `torch.export.save` stores non-persistent buffers as constants.
                is_constant = kind == "tensor_constant" or (kind == "buffer" and not content["persistent"])
                self._read_tensor(content["arg"]["name"], content[f"{kind}_name"], is_constant=is_constant)
            else:
                raise BrokenModel(f"the network has an input of kind {kind}, which is not supported.")
        if image_count != 1:
            raise BrokenModel(f"the network has {image_count} inputs; exactly one image is supported.")

    def _read_tensor(self, name: str, stored_name: str, *, is_constant: bool) -> None:
        folder, file = ("constants", "model_constants") if is_constant else ("weights", "model_weights")
        config_name = f"data/{folder}/{file}_config.json"
        if config_name not in self._configs:
            self._configs[config_name] = self._archive.read_json(config_name)["config"]
        entry = self._configs[config_name][stored_name]
        if entry["use_pickle"]:
            raise BrokenModel(f"{stored_name} is pickled; pickled tensors are not supported.")
        file, metadata = f"data/{folder}/{entry['path_name']}", entry["tensor_meta"]
        location = json.dumps([file, metadata])
        if location not in self._tensor_nodes:
            tensor = decode_tensor(self._archive.read_bytes(file), metadata)
            self._remaining_bytes -= tensor.nbytes
            if self._remaining_bytes < 0:
                raise BrokenModel("the tensors are larger than the file.")
            attribute = f"tensor_{len(self._tensor_nodes)}"
            self._root.register_buffer(attribute, tensor)
            self._tensor_nodes[location] = self._graph.get_attr(attribute)
        self._values[name] = self._tensor_nodes[location]

    def _find_outputs(self) -> dict[str, str]:
        """Return the names of the tensors that the graph returns, by the names of the outputs."""
        specs = self._signature["output_specs"]
        output_names = name_outputs(self._program["graph_module"])
        if len(output_names) != len(specs):
            output_names = [str(index) for index in range(len(specs))]
        outputs = dict[str, str]()
        for output_name, spec in zip(output_names, specs, strict=True):
            ((kind, content),) = spec.items()
            if kind != "user_output":
                raise BrokenModel(
                    f"the network has an output of kind {kind}, as in training mode; export the network in eval mode."
                )
            if "as_tensor" in content["arg"]:
                outputs[output_name] = str(content["arg"]["as_tensor"]["name"])
        return outputs

    def _read_call(self, call: Mapping[str, Any]) -> None:
        target = str(call["target"])
        if target in ASSERTIONS:
            return
        if target in BLOCKS:
            self._read_block(call)
            return
        keywords = {
            entry["name"]: self._read_argument(entry["arg"], target)
            for entry in call["inputs"]
            if not entry["arg"].keys() & IGNORED_ARGUMENT_KINDS
        }
        if keywords.get("training") is True or keywords.get("train") is True:
            raise BrokenModel(f"{target} is called in training mode; export the network in eval mode.")
        self._name_outputs(self._add_call(call, target, keywords), call["outputs"])

    def _add_call(self, call: Mapping[str, Any], target: str, keywords: dict[str, Any]) -> Node:
        if target == "torch.ops.aten.dropout.default":
            source: Node = keywords["input"]
            return source
        if target in CONVERSIONS or target == TYPE_AS:
            return self._convert(call, keywords)
        if target == ZEROS:
            return self._graph.call_function(make_zeros, (self._image, keywords["size"], keywords.get("dtype")))
        if target not in SIZE_FUNCTIONS:
            return self._graph.call_function(find_operator(target, keywords), (), keywords)
        if not all(isinstance(value, Node | int) for value in keywords.values()):
            raise BrokenModel(f"{target} is called with arguments other than sizes.")
        return self._graph.call_function(SIZE_FUNCTIONS[target], tuple(keywords.values()))

    def _convert(self, call: Mapping[str, Any], keywords: Mapping[str, Any]) -> Node:
        """Return the node of a tensor that is converted to the data type recorded for the result.

        Conversions between floating-point types are omitted, or become copies if the graph modifies tensors.
        """
        names = [call["inputs"][0]["arg"]["as_tensor"]["name"], *_iter_names(call["outputs"][0])]
        source_dtype, dtype = (DTYPES[self._description["tensor_values"][name]["dtype"]] for name in names)
        source: Node = keywords["self"]
        returns_source = dtype == source_dtype and call["target"] != COPY and keywords.get("copy") is not True
        has_equal_values = dtype == source_dtype or (dtype.is_floating_point and source_dtype.is_floating_point)
        if returns_source or (has_equal_values and not self._modifies_tensors):
            return source
        return self._graph.call_function(convert_copy if self._modifies_tensors else convert, (source, dtype))

    def _read_block(self, call: Mapping[str, Any]) -> None:
        """Add the calls of a nested graph. Its names are separate from those of the surrounding graph."""
        arguments = [entry["arg"] for entry in call["inputs"]]
        index = next(index for index, argument in enumerate(arguments) if "as_graph" in argument)
        block = arguments[index]["as_graph"]["graph"]
        operands = [self._read_argument(argument, call["target"]) for argument in arguments[index + 1 :]]
        input_names = _list_names(block["inputs"])
        surroundings = self._values, self._description
        self._values, self._description = dict(zip(input_names, operands, strict=True)), block
        for inner_call in block["nodes"]:
            self._read_call(inner_call)
        results = [self._values[name] for name in _list_names(block["outputs"])]
        self._values, self._description = surroundings
        self._values.update(zip(_list_names(call["outputs"]), results, strict=True))

    def _name_outputs(self, result: Node, outputs: list[Mapping[str, Any]]) -> None:
        names = _list_names(outputs)
        has_multiple_outputs = len(names) > 1 or any("as_tensors" in output for output in outputs)
        for index, name in enumerate(names):
            self._values[name] = (
                self._graph.call_function(operator.getitem, (result, index)) if has_multiple_outputs else result
            )

    def _read_argument(self, argument: Mapping[str, Any], target: str) -> Any:
        """Return the value of one argument of a call."""
        ((kind, value),) = argument.items()
        if kind in PLAIN_ARGUMENT_KINDS:
            return value
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self._values[value["name"]]
        if kind == "as_scalar_type":
            return DTYPES[value]
        if kind in {"as_tensors", "as_optional_tensors", "as_sym_ints"}:
            return [self._read_item(item, target) for item in value]
        if kind == "as_sym_int":
            return self._read_item(value, target)
        raise BrokenModel(f"{target} has an argument of kind {kind}, which is not supported.")

    def _read_item(self, item: Mapping[str, Any], target: str) -> Any:
        """Return a tensor or a size. A size is a number or the node of an earlier result."""
        if "name" in item:
            return self._values[item["name"]]
        if "as_name" in item:
            return self._values[item["as_name"]]
        if "as_int" in item:
            return int(item["as_int"])
        return self._read_argument(item, target)


def _find_convolution(network: GraphModule, node: Node, _shapes: Shapes) -> Layer | None:
    settings = read_arguments(network, node)
    source, weight, bias = (settings.pop(name) for name in ("input", "weight", "bias"))
    if not isinstance(weight, Tensor) or isinstance(bias, Node):
        return None
    groups = int(settings.pop("groups"))
    geometry = {name: _to_triple(value) for name, value in settings.items()}
    transposed = "output_padding" in geometry
    return Layer(make_convolution(weight, bias, groups=groups, transposed=transposed, **geometry), source, node)


def _find_batch_norm(network: GraphModule, node: Node, shapes: Shapes) -> Layer | None:
    settings, source = read_arguments(network, node), get_first_input(node)
    if not is_volume(source, shapes):
        return None
    tensors = {name: settings[name] for name in ("weight", "bias", "running_mean", "running_var")}
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return None
    module = nn.BatchNorm3d(len(tensors["running_mean"]), settings["eps"])
    module.load_state_dict(tensors, strict=False)
    return Layer(module, source, node)


_ATEN_OPS = torch.ops.aten
LAYER_FINDERS: dict[Any, LayerFinder] = {
    _ATEN_OPS.conv3d.default: _find_convolution,
    _ATEN_OPS.conv_transpose3d.input: _find_convolution,
    _ATEN_OPS.relu.default: find_activation,
    _ATEN_OPS.relu_.default: find_activation,
    _ATEN_OPS.leaky_relu.default: find_activation,
    _ATEN_OPS.leaky_relu_.default: find_activation,
    _ATEN_OPS.prelu.default: find_prelu,
    _ATEN_OPS.instance_norm.default: find_norm,
    _ATEN_OPS.group_norm.default: find_norm,
    _ATEN_OPS.batch_norm.default: _find_batch_norm,
    _ATEN_OPS.permute.default: make_shuffle_finder({_ATEN_OPS.view.default, _ATEN_OPS.reshape.default}),
}


def _to_triple(values: Sequence[int]) -> tuple[int, int, int]:
    """Return an integer for each axis. A single value applies to all three axes."""
    z, y, x = values if len(values) == 3 else (values[0],) * 3
    return int(z), int(y), int(x)


def _list_names(outputs: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for output in outputs for name in _iter_names(output)]


def _iter_names(output: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the values in an output of a call."""
    ((kind, value),) = output.items()
    if kind == "as_tensor":
        yield value["name"]
    elif kind == "as_tensors":
        yield from (item["name"] for item in value)
    elif kind in {"as_sym_int", "as_sym_bool"}:
        yield value["as_name"]
    else:
        raise BrokenModel(f"a call has an output of kind {kind}, which is not supported.")
