"""Read bioimage.io model packages in the formats 0.4 and 0.5: a description (rdf.yaml), weights and test tensors.

Source: model descriptions 0.4 and 0.5 of the bioimage.io specification.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from service.core.errors import UnsupportedPackage
from service.core.files.documents import MAX_BYTES
from service.core.types import Array
from service.models.architectures.build import ARCHITECTURES
from service.models.exporters.bioimageio_processing import make_preprocessing
from service.models.exporters.model_keys import NAME as CONFIG_KEY
from service.models.exporters.model_keys import read_model_keys
from service.models.importers import onnx_file
from service.models.importers.bioimageio_processing import (
    list_ignored_settings,
    read_activation,
    read_decoding,
    read_normalization,
)
from service.models.importers.draft import (
    Draft,
    Fields,
    PackageTest,
    WeightsKind,
    check_channel_count,
    collect_problem,
    find_file,
    read_credits,
    read_mapping,
)
from service.models.input_spec import Input

DESCRIPTION_FILES = ("rdf.yaml", "bioimageio.yaml", "model.yaml")
SUPPORTED_WEIGHTS: tuple[tuple[str, WeightsKind], ...] = (
    ("pytorch_state_dict", "state dict"),
    ("onnx", "onnx"),
    ("torchscript", "torchscript"),
)
# Minimum window size along an axis, in voxels, if the package allows several sizes.
MIN_ROI_SIZE = 64
MAX_TEST_VOXELS = 2**28
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_COVER_BYTES = 2**22


def is_package(root: Path) -> bool:
    """Return whether a folder is a bioimage.io package."""
    return _find_description(root) is not None


def read(root: Path, adapt: Callable[[Fields], Fields] = lambda rdf: rdf) -> Draft:
    """Read a package, whose description `adapt` may change. Raises UnsupportedPackage if it cannot be used."""
    rdf, version = read_description(root)
    rdf = adapt(rdf)
    input_tensor, output_tensor = (_get_only_tensor(rdf, side) for side in ("inputs", "outputs"))
    input_axes = _Axes(input_tensor)
    output_axes = _Axes(output_tensor, input_axes.channel_count)
    key, weights, kind = _choose_weights(rdf)
    content = _describe(rdf)
    content["input"] = {"channels": input_axes.channel_count, "channel_names": input_axes.channel_names}
    content["outputs"] = output_axes.channel_names or [f"output {n}" for n in range(output_axes.channel_count)]
    if kind == "state dict":
        content["architecture"] = _read_architecture(weights, version)
    tests = _read_tests(root, rdf, input_tensor, output_tensor)
    problems: dict[str, str] = {}
    _add_roi_size(content["input"], problems, input_axes, tests)
    with collect_problem(problems, "input.normalisation"):
        content["input"]["normalisation"] = read_normalization(input_tensor, input_axes.channel_count)
    with collect_problem(problems, "activation"):
        content["activation"] = read_activation(output_tensor)
    with collect_problem(problems, "decoding"):
        expected_output = tests[0].expected_output
        content["decoding"] = read_decoding(
            output_tensor, content["outputs"], content.get("activation"), expected_output
        )
    if _restore_model(rdf, content):
        problems = {}
    file = _find_checked_file(root, weights)
    if kind == "onnx":
        if "external_data" in weights:
            _find_checked_file(root, weights.get_mapping("external_data"))
        content["input"] |= onnx_file.read_settings(file)[1]
    notes = (
        f"Imported from {key} weights of {rdf.get_string('name')!r}.",
        *list_ignored_settings(input_tensor, output_tensor),
    )
    picture = _find_cover(root, rdf)
    return Draft(content, file, kind, tests, problems, notes, description="a bioimage.io package", picture=picture)


def _describe(rdf: Fields) -> dict[str, Any]:
    """Return the keys that describe the model to users."""
    return {
        "name": rdf.get_string("name"),
        "version": str(rdf.get("version") or "1"),
        "summary": rdf.get_string("description", "A bioimage.io model."),
        "licence": rdf.get_string("license", "Not stated."),
        "training_data": _read_training_data(rdf),
        **read_credits(rdf.get("authors"), rdf.get("cite")),
    }


def _restore_model(rdf: Fields, content: dict[str, Any]) -> bool:
    """Replace the content with the stored keys of an exported model, which also describe the decoding.

    Fields that other programs read have precedence. Returns False if the package contains no stored keys. Raises
    UnsupportedPackage if the normalization or the activation in the description differs from the stored one.
    """
    config = rdf.get_mapping("config")
    if CONFIG_KEY not in config:
        return False
    keys = read_model_keys(config.get(CONFIG_KEY), config.locate(CONFIG_KEY))
    steps = Fields({"preprocessing": make_preprocessing(Input.model_validate(keys["input"]))})
    normalization = read_normalization(steps, content["input"]["channels"])
    for key, stored_value, value in (
        ("input.normalisation", normalization, content["input"].get("normalisation")),
        ("activation", keys["activation"], content.get("activation")),
    ):
        if stored_value != value:
            raise UnsupportedPackage(
                f"config.{CONFIG_KEY}.{key}: the stored value does not match the steps of the package. If you changed "
                f"these steps, remove config.{CONFIG_KEY}."
            )
    described_keys = {"summary": "description", "licence": "license", "authors": "authors", "cite": "cite"}
    content |= {key: value for key, value in keys.items() if described_keys.get(key, "") not in rdf}
    return True


def read_description(root: Path) -> tuple[Fields, str]:
    """Return the description of a model and the version of the description format."""
    path = _find_description(root)
    rdf = read_mapping(path) if path is not None else Fields({})
    version = str(rdf.get("format_version"))
    if rdf.get("type") != "model" or not version.startswith(("0.4.", "0.5.")):
        raise UnsupportedPackage(
            f"format_version: expected a model in format 0.4 or 0.5, not a {rdf.get('type')} in format {version}."
        )
    return rdf, version


def _find_cover(root: Path, rdf: Fields) -> Path | None:
    """Return the first cover of a package that is a PNG file; None if there is none."""
    covers = rdf.get("covers")
    for name in covers if isinstance(covers, list) else []:
        with suppress(UnsupportedPackage, OSError, ValueError, TypeError):
            path = find_file(root, name)
            with path.open("rb") as file:
                if file.read(len(PNG_SIGNATURE)) == PNG_SIGNATURE and path.stat().st_size <= MAX_COVER_BYTES:
                    return path
    return None


def _find_description(root: Path) -> Path | None:
    for path in (root / name for name in DESCRIPTION_FILES):
        if path.is_file():
            with path.open("rb") as file:
                if b"format_version" in file.read(MAX_BYTES):
                    return find_file(root, path.name)
    return None


def _get_only_tensor(rdf: Fields, side: str) -> Fields:
    """Return the only tensor in `inputs` or `outputs`."""
    tensors = rdf.get_mappings(side)
    if len(tensors) != 1:
        raise UnsupportedPackage(f"{side}: found {len(tensors)} tensors; exactly one is supported.")
    return tensors[0]


class _Axes:
    """Channels and spatial sizes of a tensor. The shape of an output may refer to the number of input channels."""

    def __init__(self, tensor: Fields, input_channel_count: int = 1) -> None:
        self.location = tensor.locate("axes")
        self.channel_names: list[str] = []
        self.sizes: list[Any] = []
        axes = tensor.get("axes")
        if isinstance(axes, str):
            self._read_letters(tensor, axes, input_channel_count)
        else:
            self._read_list(tensor)

    def _read_letters(self, tensor: Fields, axes: str, input_channel_count: int) -> None:
        if axes != "bczyx":
            raise UnsupportedPackage(f"{self.location}: the axes are {axes!r}; only bczyx is supported.")
        shape = tensor.get("shape")
        if isinstance(shape, list):
            min_shape, steps = shape, [0] * 5
        else:
            parameters = tensor.get_mapping("shape")
            if "reference_tensor" in parameters:
                scale, offset = (list(parameters.get(key)) for key in ("scale", "offset"))
                if scale[2:] != [1, 1, 1] or any(offset[2:]):
                    location = parameters.locate("scale")
                    raise UnsupportedPackage(f"{location}: the output must have the same size as the input.")
                self.channel_count = check_channel_count(
                    round(input_channel_count * scale[1] + 2 * offset[1]), parameters.locate("scale")
                )
                self.sizes = [None] * 3
                return
            min_shape, steps = parameters.get("min"), parameters.get("step")
        self.channel_count = check_channel_count(int(min_shape[1]), tensor.locate("shape"))
        self.sizes = [_choose_size(*pair) for pair in zip(min_shape[2:], steps[2:], strict=True)]

    def _read_list(self, tensor: Fields) -> None:
        axes = tensor.get_mappings("axes")
        kinds = [(axis.get("type"), axis.get("id")) for axis in axes]
        letters = [kind if kind in {"batch", "channel"} else str(name) for kind, name in kinds]
        if letters != ["batch", "channel", "z", "y", "x"]:
            raise UnsupportedPackage(
                f"{self.location}: the axes are {', '.join(letters)}; only batch, channel, z, y, x are supported."
            )
        self.channel_names = [str(name) for name in axes[1].get("channel_names") or []]
        self.channel_count = check_channel_count(
            len(self.channel_names) or int(axes[1].get("size") or 1), axes[1].locate()
        )
        self.sizes = [_read_size(axis) for axis in axes[2:]]


def _read_size(axis: Fields) -> int | None:
    """Return the size of an axis, or None if it refers to another axis."""
    size = axis.get("size")
    if isinstance(size, dict) and size.get("offset"):
        raise UnsupportedPackage(
            f"{axis.locate('size')}: the output must have the size of the input. Export the network with padding, so "
            "that offset is 0."
        )
    if isinstance(size, dict) and "min" in size:
        return _choose_size(size["min"], size.get("step", 0))
    return size if isinstance(size, int) else None


def _choose_size(minimum: int, step: int) -> int:
    """Return the smallest allowed size that is at least `MIN_ROI_SIZE`, or `minimum` if the size is fixed."""
    return minimum if not step or minimum >= MIN_ROI_SIZE else minimum + step * -(-(MIN_ROI_SIZE - minimum) // step)


def _add_roi_size(
    content: dict[str, Any], problems: dict[str, str], axes: _Axes, tests: tuple[PackageTest, ...]
) -> None:
    test_size = tests[0].image.shape[2:] if tests else (None, None, None)
    roi_size = [size or test_length for size, test_length in zip(axes.sizes, test_size, strict=True)]
    if all(roi_size):
        content["roi_size"] = roi_size
    else:
        problems["input.roi_size"] = f"{axes.location} does not specify a size."


def _choose_weights(rdf: Fields) -> tuple[str, Fields, WeightsKind]:
    weights = rdf.get_mapping("weights")
    for name, kind in SUPPORTED_WEIGHTS:
        if name in weights and (kind != "state dict" or _find_architecture(weights.get_mapping(name)) is not None):
            return name, weights.get_mapping(name), kind
    if "pytorch_state_dict" in weights:
        entry = weights.get_mapping("pytorch_state_dict")
        raise UnsupportedPackage(
            f"{entry.locate('architecture')}: the network is not one of {', '.join(ARCHITECTURES)}. Python code from "
            "a package is never run. Use a package with onnx weights instead."
        )
    names = ", ".join(weights.as_dict()) or "none"
    raise UnsupportedPackage(f"weights: found {names}; only pytorch_state_dict, onnx and torchscript are supported.")


def _find_architecture(entry: Fields) -> str | None:
    """Return the name of a network of MONAI or pytorch-3dunet in `ARCHITECTURES`, or None for any other one."""
    architecture = entry.get("architecture")
    if isinstance(architecture, dict):
        architecture = f"{architecture.get('import_from')}.{architecture.get('callable')}"
    match = re.fullmatch(
        r"(?:monai\.networks\.nets(?:\.\w+)?[.:](?!\w+3D)|pytorch3dunet\.(?=\w+3D))(\w+)", str(architecture)
    )
    name = match[1] if match else None
    return name if name in ARCHITECTURES else None


def _read_architecture(entry: Fields, version: str) -> dict[str, Any]:
    parent = entry.get_mapping("architecture") if version.startswith("0.5") else entry
    return {"name": _find_architecture(entry), "arguments": parent.get_mapping("kwargs").as_dict()}


def _read_training_data(rdf: Fields) -> str:
    entry = rdf.get("training_data")
    return str(entry.get("id") or entry.get("name") or "Not stated.") if isinstance(entry, dict) else "Not stated."


def _find_checked_file(root: Path, entry: Fields) -> Path:
    """Return the path of the file in an entry. Raises UnsupportedPackage if its SHA-256 does not match the entry."""
    path = find_file(root, entry.get_string("source"))
    sha256 = entry.get("sha256")
    with path.open("rb") as file:
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise UnsupportedPackage(f"{entry.locate('sha256')} does not match the SHA-256 of {path.name}.")
    return path


def _read_tests(root: Path, rdf: Fields, input_tensor: Fields, output_tensor: Fields) -> tuple[PackageTest, ...]:
    if "test_tensor" in input_tensor and "test_tensor" in output_tensor:
        entries = [tensor.get_mapping("test_tensor") for tensor in (input_tensor, output_tensor)]
        paths = [_find_checked_file(root, entry) for entry in entries]
    elif rdf.get("test_inputs") and rdf.get("test_outputs"):
        paths = [find_file(root, str(rdf.get(side)[0])) for side in ("test_inputs", "test_outputs")]
    else:
        raise UnsupportedPackage("inputs[0].test_tensor is missing, so the package cannot be checked.")
    image, expected_output = (_read_tensor(path) for path in paths)
    return (PackageTest(paths[0].name, image, expected_output),)


def _read_tensor(path: Path) -> Array:
    try:
        # With memory mapping, an array cannot be larger than its file.
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile) as error:
        raise UnsupportedPackage(f"{path.name} cannot be read as an array: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 5 or array.shape[0] < 1 or array.dtype.kind not in "iuf":
        raise UnsupportedPackage(f"{path.name}: expected a numeric array of shape [B, C, z, y, x].")
    if array.size > MAX_TEST_VOXELS:
        raise UnsupportedPackage(
            f"{path.name}: a test array may have at most {MAX_TEST_VOXELS} elements, not {array.size}."
        )
    return array[:1]
