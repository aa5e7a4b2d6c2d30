"""Read the tensors of a network from `torch.save` and safetensors files without unpickling other objects."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from pickletools import genops
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from service.core.errors import BrokenModel, UnsupportedPackage
from service.core.files.zip_archive import copy_members, open_torch_archive
from service.models.architectures.build import describe_tensors
from service.models.importers.draft import MAX_PACKAGE_BYTES
from service.models.spec import Architecture

Shape = tuple[int, ...]

# First bytes of files written by PyTorch before 1.6.
LEGACY_TORCH_HEADER = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
# Keys under which training scripts usually store a network's tensors, next to optimizers and counters.
COMMON_KEYS = ("model", "state_dict", "network", "model_state_dict", "net")
# Names in pickles for NumPy's scalars, arrays and data types, in NumPy 1 and 2.
NUMPY_NAMES = (
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    *(f"numpy.dtypes.{kind}DType" for kind in ("Float16", "Float32", "Float64", "Int32", "Int64", "Bool")),
)
_PARSE_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_READ_ERRORS = (*_PARSE_ERRORS, pickle.UnpicklingError, EOFError, MemoryError, AssertionError, zipfile.BadZipFile)
MODULE_SELECTOR = ".state_dict()"
RESAVE_CODE = (
    "import torch; torch.save(torch.load({name!r}, map_location='cpu', weights_only={safe}){selector}, 'tensors.pth')"
)


class Placeholder:
    """A value without content, which replaces every object whose class is not known to be safe."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        pass


class Checkpoint(NamedTuple):
    """The tensors of one network.

    tensors       tensors by name
    keys          keys that lead from the root of the file to the tensors
    skipped_keys  other keys at the same levels, whose values are not read
    """

    tensors: dict[str, Tensor]
    keys: tuple[str, ...]
    skipped_keys: tuple[str, ...]

    def describe(self) -> str:
        """Return a phrase that describes the file."""
        tensors_phrase = f"{len(self.tensors)} tensors"
        description = f"a state dict of {tensors_phrase}"
        if self.skipped_keys:
            other_keys = ", ".join(self.skipped_keys)
            description = f"a checkpoint with {tensors_phrase} in {'.'.join(self.keys)!r} (other keys: {other_keys})"
        kernels = [tensor for tensor in self.tensors.values() if tensor.dim() == 5]
        if not kernels:
            return f"{description}, without any 3D convolution"
        first, last = (" x ".join(map(str, kernel.shape)) for kernel in (kernels[0], kernels[-1]))
        return (
            f"{description}; the weights of its first 3D convolution have the shape {first}, "
            f"and those of its last one have the shape {last}"
        )


def is_torchscript(path: Path) -> bool:
    """Return whether a file was written by `torch.jit.save`. Raises UnsupportedPackage if the archive is damaged."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with open_torch_archive(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except _READ_ERRORS as error:
        raise _make_unreadable_error(path, str(error)) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the tensors of one network from a file without unpickling anything else. Raises UnsupportedPackage.

    The tensors may be stored under a common key or under the only key with tensors. Their names may have the prefix
    that `DataParallel` adds.
    """
    content = _load_safetensors(path) if path.suffix == ".safetensors" else load_torch_file(path)
    content, keys, skipped_keys = _find_tensors(path, content)
    return Checkpoint(get_tensors(path, content), keys, skipped_keys)


def get_tensors(path: Path, content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name. Raises UnsupportedPackage if they are too large or no tensors."""
    if not _is_state_dict(content):
        raise UnsupportedPackage(f"{path.name} does not contain the tensors of one network.")
    # Tensors may be views that repeat stored elements, so a small file can contain large tensors.
    if sum(tensor.numel() * tensor.element_size() for tensor in content.values()) > MAX_PACKAGE_BYTES:
        raise UnsupportedPackage(f"The tensors in {path.name} take up more than {MAX_PACKAGE_BYTES} bytes in total.")
    return {_remove_wrappers(str(name)): tensor for name, tensor in content.items()}


def _remove_wrappers(name: str) -> str:
    """Remove the parts that `DataParallel` and `torch.compile` add to the name of a tensor."""
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")


def _load_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _make_unreadable_error(path, str(error)) from error


def load_torch_file(path: Path) -> Any:
    """Return the content of a `torch.save` file that holds plain data. Raises UnsupportedPackage for other files."""
    with path.open("rb") as file:
        header = file.read(len(LEGACY_TORCH_HEADER))
    if header == LEGACY_TORCH_HEADER:
        command = _format_command(path, safe=True, selector="")
        raise _make_unreadable_error(
            path, f"it was written by PyTorch before 1.6. Save the file again and import tensors.pth:\n{command}"
        )
    if is_torchscript(path):
        raise _make_unreadable_error(path, "it is a TorchScript program.")
    if not zipfile.is_zipfile(path):
        raise _make_unreadable_error(path, "it was written by neither PyTorch nor safetensors.")
    try:
        with open_torch_archive(path) as archive:
            archive_copy = copy_members(archive)
    except _READ_ERRORS as error:
        raise _make_unreadable_error(path, str(error)) from error
    try:
        # Training programs store metadata as NumPy values, which are not needed.
        with torch.serialization.safe_globals([(Placeholder, name) for name in NUMPY_NAMES]):
            return torch.load(archive_copy, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        raise _make_unreadable_error(path, _explain_pickled_objects(path, archive_copy) or str(error)) from error


def _format_command(path: Path, *, safe: bool, selector: str) -> str:
    """Return a shell command that saves the selected tensors of a file."""
    code = RESAVE_CODE.format(name=str(path), safe=safe, selector=selector)
    return '  python -c "' + re.sub(r'(["$`\\])', r"\\\1", code) + '"'


def _make_unreadable_error(path: Path, reason: str) -> UnsupportedPackage:
    return UnsupportedPackage(f"{path.name} cannot be read as plain tensors: {reason.strip() or 'it is damaged'}")


def _explain_pickled_objects(path: Path, archive_copy: BytesIO) -> str:
    """Explain which objects other than tensors a file contains and what to do. Return "" for any other problem."""
    archive_copy.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive_copy))
        with zipfile.ZipFile(archive_copy) as archive:
            pickle_bytes = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
        outermost_class = next(
            (str(argument).replace(" ", ".") for code, argument, _ in genops(pickle_bytes) if code.name == "GLOBAL"), ""
        )
    except (*_READ_ERRORS, StopIteration):
        return ""
    if not names:
        return ""
    selector = _find_selector(path, archive_copy, names)
    reason = f"it contains objects other than tensors: {', '.join(names[:3])}."
    if selector == MODULE_SELECTOR:
        reason = f"it is a complete pickled module, {outermost_class}."
    command = _format_command(path, safe=False, selector=selector)
    return (
        f"{reason} Unpickling it could execute arbitrary code, so StackSeg does not unpickle it. If you trust the "
        f"file, save only its tensors in the environment in which it was created, and import tensors.pth:\n{command}"
    )


def _find_selector(path: Path, archive_copy: BytesIO, names: list[str]) -> str:
    """Return the Python expression that selects the tensors in the loaded file, such as `['state_dict']`.

    The file is read without its other objects, which are replaced with placeholders.
    """
    archive_copy.seek(0)
    try:
        with torch.serialization.safe_globals([(Placeholder, name) for name in names]):
            content = torch.load(archive_copy, map_location="cpu", weights_only=True)
        if isinstance(content, Placeholder):
            return MODULE_SELECTOR
        modules = [
            key for key in COMMON_KEYS if isinstance(content, dict) and isinstance(content.get(key), Placeholder)
        ]
        if modules:
            return f"[{modules[0]!r}]{MODULE_SELECTOR}"
        _, keys, _ = _find_tensors(path, content)
    except (*_READ_ERRORS, UnsupportedPackage):
        return "['state_dict']"
    return "".join(f"[{key!r}]" for key in keys)


def _find_tensors(path: Path, content: Any) -> tuple[Mapping[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """Return the tensors in the content of a file, the keys that lead to them, and the skipped keys."""
    keys, skipped_keys = list[str](), list[str]()
    while isinstance(content, dict) and not _is_state_dict(content):
        chosen_key = _choose_key(path, content, keys)
        keys.append(str(chosen_key))
        skipped_keys += [str(key) for key in content if key != chosen_key]
        content = content[chosen_key]
    if not isinstance(content, dict):
        raise UnsupportedPackage(f"{path.name} does not contain the tensors of one network.")
    return content, tuple(keys), tuple(skipped_keys)


def _choose_key(path: Path, content: dict[Any, Any], parent_keys: list[str]) -> Any:
    """Return a common key for tensors, or the only key with tensors. Raises UnsupportedPackage if neither exists."""
    common_keys = [key for key in COMMON_KEYS if isinstance(content.get(key), dict)]
    if common_keys:
        # `model` may also be a configuration stored next to the tensors.
        return next((key for key in common_keys if _is_state_dict(content[key])), common_keys[0])
    network_keys = _find_networks(content)
    if len(network_keys) == 1:
        return network_keys[0]
    names = ", ".join(map(str, list(network_keys or content)[:6])) or "nothing"
    if not network_keys:
        raise UnsupportedPackage(f"{path.name} contains no tensors of a network ({names}).")
    command = _format_command(path, safe=True, selector=_format_selector([*parent_keys, network_keys[0]]))
    raise UnsupportedPackage(
        f"{path.name} contains several networks ({names}). Save one of them and import tensors.pth:\n{command}"
    )


def _format_selector(keys: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in keys)


def _find_networks(content: dict[Any, Any]) -> list[Any]:
    keys = [key for key, value in content.items() if "optim" not in str(key) and _contains_state_dict(value)]
    return [key for key, value in content.items() if _is_state_dict(value)] or keys


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_plain_tensor, value.values()))


def _contains_state_dict(value: object, depth: int = 4) -> bool:
    """Return whether nested dictionaries contain a state dict with names such as `conv.weight`."""
    if not isinstance(value, dict) or depth == 0:
        return False
    if _is_state_dict(value):
        return any("." in str(name) for name in value)
    return any(_contains_state_dict(item, depth - 1) for item in value.values())


def _is_plain_tensor(value: object) -> bool:
    """Return whether a value is a dense, real-valued, non-quantized tensor in CPU memory."""
    if not isinstance(value, Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout is torch.strided and value.device.type == "cpu"


def fit_tensors(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return the tensors under the names that the architecture uses.

    A prefix that a wrapper has added to the names (`model.`, `_orig_mod.`) is removed. Tensors without this prefix,
    such as the weights of a loss, do not belong to the network. Raises BrokenModel with the differences if the tensors
    do not fit, or if several networks in the file fit.
    """
    expected_shapes = describe_tensors(architecture)
    groups = _group_by_prefix(tensors, expected_shapes)
    fitting_prefixes = [prefix for prefix, group in groups.items() if not _find_mismatches(group, expected_shapes)]
    if len(fitting_prefixes) > 1:
        prefixes = ", ".join(map(repr, fitting_prefixes))
        raise BrokenModel(
            f"The file contains several sets of weights for {architecture.name}, whose names begin with {prefixes}. "
            "Save the weights to use in a file of their own."
        )
    prefix = fitting_prefixes[0] if fitting_prefixes else _find_best_prefix(groups, expected_shapes)
    problems = _find_mismatches(groups[prefix], expected_shapes)
    if problems:
        raise BrokenModel(
            f"The weights do not fit {architecture.name} with these arguments: {'; '.join(problems)}. Specify the "
            "arguments with which the network was trained. Tensors that do not belong to the network must be removed."
        )
    return groups[prefix]


def list_other_tensors(tensors: Mapping[str, Tensor], fitted_tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors in a file that `fit_tensors` did not use."""
    used_ids = set(map(id, fitted_tensors.values()))
    return [name for name, tensor in tensors.items() if id(tensor) not in used_ids]


def _group_by_prefix(
    tensors: Mapping[str, Tensor], expected_shapes: Mapping[str, Shape]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors without their prefix, by every prefix that occurs before a name of the architecture."""
    groups = {"": dict(tensors)}
    for name in tensors:
        parts = name.split(".")
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length]) + "."
            if prefix not in groups and name.removeprefix(prefix) in expected_shapes:
                groups[prefix] = {
                    key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)
                }
    return groups


def _find_best_prefix(groups: Mapping[str, Mapping[str, Tensor]], expected_shapes: Mapping[str, Shape]) -> str:
    """Return the prefix with the most names of the architecture."""
    return max(groups, key=lambda prefix: len(groups[prefix].keys() & expected_shapes.keys()))


def _find_mismatches(tensors: Mapping[str, Tensor], expected_shapes: Mapping[str, Shape]) -> list[str]:
    return _list_mismatches({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected_shapes)


def _list_mismatches(found_shapes: Mapping[str, Shape], expected_shapes: Mapping[str, Shape]) -> list[str]:
    """Describe which tensors are missing, which are unexpected, and which have a different shape."""
    wrong_shapes = [
        f"{name} is {' x '.join(map(str, shape))} instead of {' x '.join(map(str, expected_shapes[name]))}"
        for name, shape in found_shapes.items()
        if shape != expected_shapes.get(name, shape)
    ]
    mismatches = (
        ("missing", [name for name in expected_shapes if name not in found_shapes]),
        ("not in the network", [name for name in found_shapes if name not in expected_shapes]),
        ("of a different shape", wrong_shapes),
    )
    return [
        f"{len(names)} {'tensors are' if len(names) > 1 else 'tensor is'} {problem} ({', '.join(names[:2])})"
        for problem, names in mismatches
        if names
    ]
