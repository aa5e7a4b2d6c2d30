"""Networks that come as graphs: files of `torch.export`, read without `torch.export.load`.

That function evaluates text of the file as Python expressions and unpickles what it holds. But what makes the network
is JSON, a list of calls of operators, and plain bytes, its weights. Those two are read here and nothing else, and every
operator must be on the list of `service.models.torchscript`. Format: schema version 8 of
`torch._export.serde.schema`, in the PT2 archive that `torch.export.save` writes since torch 2.8.
"""

from __future__ import annotations

import json
import math
import operator
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from service.core.errors import BrokenModel
from service.models.allowed_operators import ATEN

SCHEMA = 8
GRAPH_BYTES = 2**26

# torch._export.serde.schema.ScalarType
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
# What graphs have in place of methods of tensors.
SIZES_AND_COPIES = frozenset(["sym_size", "lift_fresh_copy", "detach_"])
PLAIN = ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string")
ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "getitem")
}
# What a file that is no such archive, or is damaged, makes of the code below.
_DAMAGE = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OSError, zipfile.BadZipFile)


def load_torch_export(path: Path) -> nn.Module:
    """The network of a `.pt2` file, float32 or as it was saved, on the CPU, in evaluation mode.

    Convolutions become modules of their own, which engines can replace. Raises BrokenModel, naming what is refused.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            network = _Reader(_Archive(archive)).network()
    except BrokenModel as error:
        raise BrokenModel(f"{path}: {error}") from error
    except RecursionError as error:
        raise BrokenModel(f"{path}: its graph is nested too deeply.") from error
    except _DAMAGE as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BrokenModel(f"{path}: cannot be read as a file of torch.export: {reason[0]}") from error
    return network.eval().requires_grad_(requires_grad=False)


class _Archive:
    """The files of a PT2 archive by their path below its one folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {str(PurePosixPath(*PurePosixPath(e.filename).parts[1:])): e for e in archive.infolist()}

    def bytes(self, name: str) -> bytes:
        """A file. Raises BrokenModel where there is none, or it is compressed, as nothing in such an archive is."""
        entry = self._entries.get(name)
        if entry is None:
            raise BrokenModel(f"there is no {name} in it; export the network again with torch 2.8 or later.")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise BrokenModel(f"{name} is compressed, which torch.export.save does not do.")
        return self._archive.read(entry)

    def json(self, name: str) -> Any:
        """A file of JSON."""
        text = self.bytes(name)
        if len(text) > GRAPH_BYTES:
            raise BrokenModel(f"{name} is larger than a graph can be.")
        return json.loads(text)


class _Reader:
    """One network while it is put together.

    values   the graph's nodes by their names in the file; `tensors` what those of them hold that are stored in it
    configs  where tensors are stored, by the name of the file that tells
    """

    def __init__(self, archive: _Archive) -> None:
        self._archive = archive
        program = archive.json("models/model.json")
        if (version := program["schema_version"]["major"]) != SCHEMA:
            raise BrokenModel(f"its schema has version {version}; {SCHEMA} can be read.")
        self._graph: Mapping[str, Any] = program["graph_module"]["graph"]
        self._signature: Mapping[str, Any] = program["graph_module"]["signature"]
        self._root = nn.Module()
        self._made = Graph()
        self._values: dict[str, Node] = {}
        self._tensors: dict[Node, Tensor] = {}
        self._configs: dict[str, Any] = {}

    def network(self) -> GraphModule:
        """The whole of it."""
        self._inputs()
        for call in self._graph["nodes"]:
            self._call(call)
        self._made.output(self._values[self._result()])
        for node in self._tensors:
            # Convolutions hold their own; a second one would be converted, and take memory, beside it.
            if not node.users:
                self._made.erase_node(node)
        self._made.lint()
        return GraphModule(self._root, self._made)

    def _inputs(self) -> None:
        """One image; everything else that goes in is a tensor of the file."""
        images = 0
        for spec in self._signature["input_specs"]:
            ((kind, given),) = spec.items()
            if kind == "user_input":
                images += 1
                name = given["arg"]["as_tensor"]["name"]
                self._values[name] = self._made.placeholder(f"image_{images}")
            elif kind in {"parameter", "buffer", "tensor_constant"}:
                self._tensor(given["arg"]["name"], given[f"{kind}_name"], constant=_is_constant(kind, given))
            else:
                raise BrokenModel(f"it takes a {kind}, which cannot be honoured.")
        if images != 1:
            raise BrokenModel(f"it takes {images} inputs; exactly one image can be given.")

    def _tensor(self, name: str, stored: str, *, constant: bool) -> None:
        folder, file = ("constants", "model_constants") if constant else ("weights", "model_weights")
        name_of_config = f"data/{folder}/{file}_config.json"
        if name_of_config not in self._configs:
            self._configs[name_of_config] = self._archive.json(name_of_config)["config"]
        entry = self._configs[name_of_config][stored]
        if entry["use_pickle"]:
            raise BrokenModel(f"{stored} is pickled, and what is pickled is not read.")
        tensor = _tensor(self._archive.bytes(f"data/{folder}/{entry['path_name']}"), entry["tensor_meta"])
        attribute = f"tensor_{len(self._tensors)}"
        self._root.register_buffer(attribute, tensor)
        self._values[name] = node = self._made.get_attr(attribute)
        self._tensors[node] = tensor

    def _result(self) -> str:
        """The name of what comes out, of several tensors the first."""
        for spec in self._signature["output_specs"]:
            ((kind, given),) = spec.items()
            if kind == "user_output":
                return str(given["arg"]["as_tensor"]["name"])
            raise BrokenModel(f"it changes a {kind}, as networks do while they are trained; export it in eval mode.")
        raise BrokenModel("nothing comes out of it.")

    def _call(self, call: Mapping[str, Any]) -> None:
        target = str(call["target"])
        keywords = {given["name"]: self._argument(given["arg"], target) for given in call["inputs"]}
        if keywords.get("training") is True or keywords.get("train") is True:
            raise BrokenModel(f"{target} is called as in training; export the network in eval mode.")
        if target == "torch.ops.aten.conv3d.default" and (node := self._convolution(keywords)) is not None:
            made = node
        elif target in ARITHMETIC:
            if not all(isinstance(value, Node | int) for value in keywords.values()):
                raise BrokenModel(f"{target} is called with something else than sizes.")
            made = self._made.call_function(ARITHMETIC[target], tuple(keywords.values()))
        else:
            made = self._made.call_function(_operator(target), (), keywords)
        self._name(made, call["outputs"])

    def _name(self, made: Node, outputs: list[Mapping[str, Any]]) -> None:
        names = [name for output in outputs for name in _names(output)]
        several = len(names) > 1 or any("as_tensors" in output for output in outputs)
        for index, name in enumerate(names):
            self._values[name] = self._made.call_function(operator.getitem, (made, index)) if several else made

    def _convolution(self, given: Mapping[str, Any]) -> Node | None:
        """As a module, where weights are tensors of the file and padding is a number of voxels."""
        weight, bias = self._tensors.get(given["weight"]), self._tensors.get(given.get("bias"))  # type: ignore[arg-type]
        if weight is None or (given.get("bias") is not None and bias is None):
            return None
        groups = int(given.get("groups", 1))
        module = nn.Conv3d(
            weight.shape[1] * groups,
            weight.shape[0],
            _three(weight.shape[2:]),
            stride=_three(given.get("stride", (1, 1, 1))),
            padding=_three(given.get("padding", (0, 0, 0))),
            dilation=_three(given.get("dilation", (1, 1, 1))),
            groups=groups,
            bias=False,
        )
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        name = f"convolution_{sum(1 for _ in self._root.children())}"
        self._root.add_module(name, module)
        return self._made.call_module(name, (given["input"],))

    def _argument(self, given: Mapping[str, Any], target: str) -> Any:
        """What one argument of a call stands for."""
        ((kind, value),) = given.items()
        if kind in PLAIN:
            return value
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self._values[value["name"]]
        if kind == "as_scalar_type":
            return DTYPES[value]
        if kind in {"as_tensors", "as_optional_tensors", "as_sym_ints"}:
            return [self._item(item, target) for item in value]
        if kind == "as_sym_int":
            return self._item(value, target)
        raise BrokenModel(f"{target} takes an argument {kind}, which cannot be honoured.")

    def _item(self, item: Mapping[str, Any], target: str) -> Any:
        """A tensor, or a size that is a number or was computed before."""
        if "name" in item:
            return self._values[item["name"]]
        if "as_name" in item:
            return self._values[item["as_name"]]
        if "as_int" in item:
            return int(item["as_int"])
        return self._argument(item, target)


def _three(values: Sequence[int]) -> tuple[int, int, int]:
    """One number for each axis, or one for all."""
    z, y, x = values if len(values) == 3 else (values[0],) * 3
    return int(z), int(y), int(x)


def _is_constant(kind: str, given: Mapping[str, Any]) -> bool:
    """Where `torch.export.save` puts it: beside the weights, or apart from them."""
    return kind == "tensor_constant" or (kind == "buffer" and not given["persistent"])


def _names(output: Mapping[str, Any]) -> Iterator[str]:
    """The names that a call gives to what comes out."""
    ((kind, value),) = output.items()
    if kind == "as_tensor":
        yield value["name"]
    elif kind == "as_tensors":
        yield from (item["name"] for item in value)
    elif kind == "as_sym_int":
        yield value["as_name"]
    else:
        raise BrokenModel(f"a call gives {kind}, which cannot be honoured.")


def _operator(target: str) -> OpOverload[..., Any]:
    space, _, rest = target.rpartition("torch.ops.aten.")
    name, _, overload = rest.partition(".")
    if space or (name not in ATEN | SIZES_AND_COPIES) or not overload.isidentifier():
        raise BrokenModel(f"its graph calls {target}, which is not on the list in service/models/allowed_operators.py.")
    found = getattr(getattr(torch.ops.aten, name), overload)
    if not isinstance(found, OpOverload):
        raise BrokenModel(f"its graph calls {target}, which is no operator.")
    return found


def _tensor(data: bytes, meta: Mapping[str, Any]) -> Tensor:
    """Raw little-endian bytes -> a tensor of its own memory; BrokenModel or RuntimeError where they do not fit."""
    sizes, strides = ([int(item["as_int"]) for item in meta[key]] for key in ("sizes", "strides"))
    dtype = DTYPES[meta["dtype"]]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    stored = torch.frombuffer(bytearray(data), dtype=dtype)
    if math.prod(sizes) > len(stored):
        raise BrokenModel(f"a tensor of {sizes} is said to lie in {len(data)} bytes.")
    return stored.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"])).clone()
