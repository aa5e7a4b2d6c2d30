"""bioimage.io model packages: `rdf.yaml` or `bioimageio.yaml`, versions 0.4 and 0.5, with weights and test tensors.

Source: the model descriptions 0.4 and 0.5 of the bioimage.io specification.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from service.core.errors import UnsupportedPackage
from service.core.volume import Array
from service.models.architectures import ARCHITECTURES
from service.models.importers import onnx_package
from service.models.importers.package import Draft, Fields, Kind, Proof, member, read_mapping

FILES = ("rdf.yaml", "bioimageio.yaml", "model.yaml")
SUPPORTED: tuple[tuple[str, Kind], ...] = (
    ("pytorch_state_dict", "state dict"),
    ("torchscript", "torchscript"),
    ("onnx", "onnx"),
)
WINDOW = 64


def recognises(root: Path) -> bool:
    return _description(root) is not None


def read(root: Path) -> Draft:
    """What a package says. Raises UnsupportedPackage where it is damaged, or nothing of it can be served."""
    rdf, version = _stated(root)
    taken, given = (_only(rdf, side) for side in ("inputs", "outputs"))
    inputs = _Axes(taken)
    outputs = _Axes(given, inputs.channels)
    name, weights, kind = _weights(rdf)
    content: dict[str, Any] = {
        "name": rdf.text("name"),
        "version": str(rdf.get("version") or "1"),
        "summary": rdf.text("description", "A bioimage.io model."),
        "licence": rdf.text("license", "Not stated."),
        "training_data": _training_data(rdf),
        "input": {"channels": inputs.channels, "channel_names": inputs.names},
        "outputs": outputs.names or [f"output {number}" for number in range(outputs.channels)],
    }
    if kind == "state dict":
        content["architecture"] = _architecture(weights, version)
    proofs = _proofs(root, rdf, taken, given)
    problems: dict[str, str] = {}
    _size(content["input"], problems, inputs, proofs)
    with _noted(problems, "input.normalisation"):
        content["input"]["normalisation"] = _normalisation(taken)
    with _noted(problems, "activation"):
        content["activation"] = _activation(given)
    if outputs.channels > 1 and content.get("activation") != "sigmoid":
        content["decoding"] = {"kind": "classes"}
    else:
        problems["decoding"] = f"{given.where()}: does not say what labels are made from."
    file = _file(root, weights)
    if kind == "onnx":
        content["input"] |= _of_onnx(root, weights, file)
    return Draft(content, file, kind, proofs, problems, (f"Taken from weights.{name} of {rdf.text('name')}.",))


def _stated(root: Path) -> tuple[Fields, str]:
    """The description of a model, and the version of the format that it is written in."""
    path = _description(root)
    rdf = read_mapping(path) if path is not None else Fields({})
    version = str(rdf.get("format_version"))
    if rdf.get("type") != "model" or not version.startswith(("0.4.", "0.5.")):
        raise UnsupportedPackage(f"format_version: {version} of a {rdf.get('type')}; models of 0.4 and 0.5 are read.")
    return rdf, version


@contextmanager
def _noted(problems: dict[str, str], key: str) -> Iterator[None]:
    """What cannot be honoured is left to who imports the package, by its key in the model file."""
    try:
        yield
    except UnsupportedPackage as error:
        problems[key] = str(error)


def _of_onnx(root: Path, weights: Fields, file: Path) -> dict[str, Any]:
    """What an ONNX file says of its input; weights beside it are checked as well."""
    if "external_data" in weights:
        _file(root, weights.inner("external_data"))
    return onnx_package.stated(file)


def _description(root: Path) -> Path | None:
    found = [root / name for name in FILES if (root / name).is_file()]
    for path in found:
        if "format_version" in path.read_text(encoding="utf-8", errors="replace"):
            return path
    return None


def _only(rdf: Fields, side: str) -> Fields:
    tensors = rdf.each(side)
    if len(tensors) != 1:
        raise UnsupportedPackage(f"{side}: {len(tensors)} tensors; exactly one can be honoured.")
    return tensors[0]


class _Axes:
    """Channels, their names, and sizes along z, y, x of a tensor whose axes are batch, channel, z, y, x.

    `reference` is the number of channels of the tensor that it may refer to.
    """

    def __init__(self, tensor: Fields, reference: int = 1) -> None:
        self.where = tensor.where("axes")
        self.names: list[str] = []
        self.sizes: list[Any] = []
        axes = tensor.get("axes")
        if isinstance(axes, str):
            self._read_letters(tensor, axes, reference)
        else:
            self._read_list(tensor)

    def _read_letters(self, tensor: Fields, axes: str, reference: int) -> None:
        if axes != "bczyx":
            raise UnsupportedPackage(f"{self.where}: {axes!r}; only bczyx can be honoured.")
        shape = tensor.get("shape")
        if isinstance(shape, list):
            lowest, step = shape, [0] * 5
        else:
            described = tensor.inner("shape")
            if "reference_tensor" in described:
                scale, offset = (list(described.get(key)) for key in ("scale", "offset"))
                if scale[2:] != [1, 1, 1] or any(offset[2:]):
                    where = described.where("scale")
                    raise UnsupportedPackage(f"{where}: the output must have the size of the input.")
                self.channels = round(reference * scale[1] + 2 * offset[1])
                self.sizes = [None] * 3
                return
            lowest, step = described.get("min"), described.get("step")
        self.channels = int(lowest[1])
        self.sizes = [_sized(low, by) for low, by in zip(lowest[2:], step[2:], strict=True)]

    def _read_list(self, tensor: Fields) -> None:
        axes = tensor.each("axes")
        kinds = [(axis.get("type"), axis.get("id")) for axis in axes]
        letters = [kind if kind in {"batch", "channel"} else str(name) for kind, name in kinds]
        if letters != ["batch", "channel", "z", "y", "x"]:
            raise UnsupportedPackage(
                f"{self.where}: {', '.join(letters)}; only batch, channel, z, y, x can be honoured."
            )
        self.names = [str(name) for name in axes[1].get("channel_names") or []]
        self.channels = len(self.names) or int(axes[1].get("size") or 1)
        self.sizes = [_edge(axis) for axis in axes[2:]]


def _edge(axis: Fields) -> int | None:
    """The size of an axis, None where it is that of another one."""
    size = axis.get("size")
    if axis.get("halo") or (isinstance(size, dict) and size.get("offset")):
        raise UnsupportedPackage(f"{axis.where('size')}: the output must have the size of the input, no halo.")
    if isinstance(size, dict) and "min" in size:
        return _sized(size["min"], size.get("step", 0))
    return size if isinstance(size, int) else None


def _sized(lowest: int, step: int) -> int:
    """The smallest size allowed that is no smaller than the usual window."""
    return lowest if not step or lowest >= WINDOW else lowest + step * -(-(WINDOW - lowest) // step)


def _size(content: dict[str, Any], problems: dict[str, str], axes: _Axes, proofs: tuple[Proof, ...]) -> None:
    tested = proofs[0].image.shape[2:] if proofs else (None, None, None)
    size = [edge or test for edge, test in zip(axes.sizes, tested, strict=True)]
    if all(size):
        content["roi_size"] = size
    else:
        problems["input.roi_size"] = f"{axes.where}: does not say a size."


def _weights(rdf: Fields) -> tuple[str, Fields, Kind]:
    weights = rdf.inner("weights")
    for name, kind in SUPPORTED:
        if name in weights and (kind != "state dict" or _library(weights.inner(name)) is not None):
            return name, weights.inner(name), kind
    if "pytorch_state_dict" in weights:
        entry = weights.inner("pytorch_state_dict")
        raise UnsupportedPackage(
            f"{entry.where('architecture')}: the network is Python code or none of {', '.join(ARCHITECTURES)}; no code "
            "of a package is run. A package with torchscript or onnx weights can be imported."
        )
    there = ", ".join(weights.plain()) or "none"
    raise UnsupportedPackage(f"weights: there are {there}; pytorch_state_dict, torchscript or onnx can be honoured.")


def _library(entry: Fields) -> str | None:
    """The name of a known network of MONAI, or None."""
    architecture = entry.get("architecture")
    if isinstance(architecture, str):
        match = re.fullmatch(r"monai\.networks\.nets(?:\.\w+)?[.:](\w+)", architecture)
        name = match[1] if match else None
    elif isinstance(architecture, dict) and str(architecture.get("import_from")).startswith("monai.networks.nets"):
        name = str(architecture.get("callable"))
    else:
        name = None
    return name if name in ARCHITECTURES else None


def _architecture(entry: Fields, version: str) -> dict[str, Any]:
    holder = entry.inner("architecture") if version.startswith("0.5") else entry
    return {"name": _library(entry), "arguments": holder.inner("kwargs").plain()}


def _training_data(rdf: Fields) -> str:
    data = rdf.get("training_data")
    return str(data.get("id") or data.get("name") or "Not stated.") if isinstance(data, dict) else "Not stated."


def _file(root: Path, entry: Fields) -> Path:
    path = member(root, entry.text("source"))
    _check_digest(path, entry)
    return path


def _check_digest(path: Path, entry: Fields) -> None:
    stated = entry.get("sha256")
    with path.open("rb") as file:
        if stated is not None and hashlib.file_digest(file, "sha256").hexdigest() != stated:
            raise UnsupportedPackage(f"{entry.where('sha256')}: {path.name} has another one.")


def _proofs(root: Path, rdf: Fields, taken: Fields, given: Fields) -> tuple[Proof, ...]:
    if "test_tensor" in taken and "test_tensor" in given:
        entries = [tensor.inner("test_tensor") for tensor in (taken, given)]
        paths = [_file(root, entry) for entry in entries]
    elif rdf.get("test_inputs") and rdf.get("test_outputs"):
        paths = [member(root, str(rdf.get(side)[0])) for side in ("test_inputs", "test_outputs")]
    else:
        raise UnsupportedPackage("inputs[0].test_tensor: a package without its tests cannot be checked.")
    image, expected = (_tensor(path) for path in paths)
    return (Proof(paths[0].name, image, expected),)


def _tensor(path: Path) -> Array:
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UnsupportedPackage(f"{path.name}: cannot be read as an array: {error}") from error
    if array.ndim != 5 or array.shape[0] != 1 or array.dtype.kind not in "iuf":
        raise UnsupportedPackage(f"{path.name}: [1, C, z, y, x] is expected, not {array.shape} of {array.dtype}.")
    return array


def _steps(tensor: Fields, key: str) -> list[tuple[str, Fields]]:
    """Names (`id` since 0.5, `name` before) and settings of a chain, without changes of the dtype."""
    steps = [(str(step.get("id") or step.get("name")), step.inner("kwargs")) for step in tensor.each(key)]
    return [(name, settings) for name, settings in steps if name != "ensure_dtype"]


def _normalisation(tensor: Fields) -> dict[str, Any]:
    steps = _steps(tensor, "preprocessing")
    if not steps:
        return {"kind": "range", "low": 0.0, "high": 1.0}
    (name, settings), *rest = steps
    if name == "zero_mean_unit_variance" and settings.get("mode") != "fixed":
        _nothing_after(name, rest)
        _check_extent(settings)
        return {"kind": "zscore"}
    clip = None
    if len(rest) == 1 and rest[0][0] == "clip" and name != "zero_mean_unit_variance":
        clip = [float(rest[0][1].get(key)) for key in ("min", "max")]
        rest = []
    _nothing_after(name, rest)
    if name not in _RANGES:
        raise UnsupportedPackage(f"{settings.where()}: {name} cannot be honoured.")
    kind, low, high = _RANGES[name](settings)
    return {"kind": kind, "low": low, "high": high, "clip": clip}


def _nothing_after(name: str, rest: list[tuple[str, Fields]]) -> None:
    if rest:
        raise UnsupportedPackage(f"{rest[0][1].where()}: {rest[0][0]} after {name} cannot be honoured.")


def _percentiles(settings: Fields) -> tuple[str, float, float]:
    _check_extent(settings)
    low, high = (settings.get(key) for key in ("min_percentile", "max_percentile"))
    return "percentile", 0.0 if low is None else float(low), 100.0 if high is None else float(high)


def _fixed(settings: Fields) -> tuple[str, float, float]:
    low = _one(settings, "mean")
    return "range", low, low + _one(settings, "std")


def _linear(settings: Fields) -> tuple[str, float, float]:
    gain, offset = _one(settings, "gain", 1.0), _one(settings, "offset", 0.0)
    return "range", -offset / gain, (1 - offset) / gain


# Steps that send two values of the stack, or of its percentiles, to 0 and 1.
_RANGES: dict[str, Callable[[Fields], tuple[str, float, float]]] = {
    "scale_range": _percentiles,
    "fixed_zero_mean_unit_variance": _fixed,
    "zero_mean_unit_variance": _fixed,
    "scale_linear": _linear,
}


def _one(settings: Fields, key: str, default: float | None = None) -> float:
    """A number, or a list that holds one."""
    value = settings.get(key) if key in settings else default
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedPackage(f"{settings.where(key)}: one number is expected, not {value!r}.")
    return float(value)


def _check_extent(settings: Fields) -> None:
    """Statistics must be those of a whole channel."""
    axes = settings.get("axes")
    if axes is not None and not {"z", "y", "x"} <= set(axes):
        raise UnsupportedPackage(f"{settings.where('axes')}: only statistics over z, y and x can be honoured.")
    if "reference_tensor" in settings or settings.get("mode") == "per_dataset":
        raise UnsupportedPackage(f"{settings.where('mode')}: only statistics of the stack itself can be honoured.")


def _activation(tensor: Fields) -> str:
    steps = _steps(tensor, "postprocessing")
    if not steps:
        return "none"
    name, settings = steps[0]
    if len(steps) > 1 or name not in {"sigmoid", "softmax"}:
        refused = steps[1][0] if name in {"sigmoid", "softmax"} else name
        raise UnsupportedPackage(f"{settings.where()}: {refused} cannot be honoured, only one sigmoid or softmax.")
    return name
