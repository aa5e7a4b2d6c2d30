"""Files of `torch.save` and safetensors: what one is, without unpickling objects, and the tensors of one network."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
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
from service.models.architectures import describe_tensors
from service.models.importers.draft import MAX_PACKAGE_BYTES
from service.models.spec import Architecture

Shape = tuple[int, ...]

# How files of torch before 1.6 begin.
OLD_TORCH = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
# Keys below which training scripts keep a network's tensors; a checkpoint has optimisers and counters beside them.
USUAL_KEYS = ("model", "state_dict", "network", "model_state_dict", "net")
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_UNREADABLE = (*_DAMAGE, pickle.UnpicklingError, EOFError, MemoryError, AssertionError, zipfile.BadZipFile)
SAVE_AGAIN = (
    "  python -c \"import torch; torch.save(torch.load({name!r}, map_location='cpu', weights_only={safe}){part}, "
    "'tensors.pth')\""
)


class Checkpoint(NamedTuple):
    """Tensors of one network by name; the keys below which they lay, and what lay beside them."""

    tensors: dict[str, Tensor]
    place: tuple[str, ...]
    left_out: tuple[str, ...]

    def describe(self) -> str:
        """Return what the file is, in words."""
        count = f"{len(self.tensors)} tensors"
        kind = f"a state dict of {count}"
        if self.left_out:
            beside = ", ".join(self.left_out)
            kind = f"a checkpoint, whose {'.'.join(self.place)!r} holds {count} beside {beside}"
        kernels = [tensor for tensor in self.tensors.values() if tensor.dim() == 5]
        if not kernels:
            return f"{kind}, none of them of a 3D convolution"
        first, last = (" x ".join(map(str, kernel.shape)) for kernel in (kernels[0], kernels[-1]))
        return f"{kind}; its first 3D convolution has a kernel of {first}, its last one of {last}"


def is_torchscript(path: Path) -> bool:
    """Return whether a file is an archive that `torch.jit.save` wrote. Raise UnsupportedPackage for a damaged one."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        with open_torch_archive(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except _UNREADABLE as error:
        raise _unreadable(path, str(error)) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the tensors of one network from a file without unpickling anything else. Raise UnsupportedPackage.

    They may lie below a usual key, or below the only key that holds tensors, and have `DataParallel`'s prefix.
    """
    content = _load_safetensors(path) if path.suffix == ".safetensors" else _load(path)
    content, place, left_out = _find_tensors(path, content)
    # A tensor may repeat what is stored, so that a small file has large ones.
    if sum(tensor.numel() * tensor.element_size() for tensor in content.values()) > MAX_PACKAGE_BYTES:
        raise UnsupportedPackage(f"{path.name}: holds tensors of more than {MAX_PACKAGE_BYTES} bytes.")
    return Checkpoint({str(key).removeprefix("module."): value for key, value in content.items()}, place, left_out)


def _load_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error)) from error


def _load(path: Path) -> Any:
    """Return what `torch.save` wrote, if it is plain. Raise UnsupportedPackage, saying what the file is otherwise."""
    with path.open("rb") as file:
        start = file.read(len(OLD_TORCH))
    if start == OLD_TORCH:
        again = SAVE_AGAIN.format(name=path.name, safe=True, part="")
        raise _unreadable(path, f"a torch before 1.6 wrote it. Save it again, and import tensors.pth:\n{again}")
    if is_torchscript(path):
        raise _unreadable(path, "it is a TorchScript program.")
    if not zipfile.is_zipfile(path):
        raise _unreadable(path, "neither torch nor safetensors wrote it.")
    try:
        with open_torch_archive(path) as archive:
            copy = copy_members(archive)
    except _UNREADABLE as error:
        raise _unreadable(path, str(error)) from error
    try:
        return torch.load(copy, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise _unreadable(path, _explain(path, copy) or str(error)) from error


def _unreadable(path: Path, reason: str) -> UnsupportedPackage:
    return UnsupportedPackage(f"{path.name}: cannot be read as plain tensors: {reason.strip() or 'damaged'}")


def _explain(path: Path, copy: BytesIO) -> str:
    """Return which objects a file holds beside tensors, and what to do; "" where that is not why it cannot be read."""
    copy.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(copy))
        with zipfile.ZipFile(copy) as archive:
            pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
        outermost = next(
            (str(text).replace(" ", ".") for code, text, _ in genops(pickled) if code.name == "GLOBAL"), ""
        )
    except (*_UNREADABLE, StopIteration):
        return ""
    if not names:
        return ""
    if outermost in names:
        what, part = f"it is a whole pickled module, {outermost}.", ".state_dict()"
    else:
        what, part = f"it holds other objects, of {', '.join(names[:3])}, beside tensors.", "['state_dict']"
    again = SAVE_AGAIN.format(name=path.name, safe=False, part=part)
    return (
        f"{what} Unpickling it could run any code, so it is not done here. Where you trust it, save its tensors alone "
        f"where it was made, and import tensors.pth:\n{again}"
    )


def _find_tensors(path: Path, content: Any) -> tuple[Mapping[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """Return the tensors in what a file holds, the keys that lead to them, and the keys beside those."""
    place, left_out = list[str](), list[str]()
    while isinstance(content, dict) and not _is_state_dict(content):
        chosen = _choose_key(path, content)
        place.append(str(chosen))
        left_out += [str(key) for key in content if key != chosen]
        content = content[chosen]
    if not isinstance(content, dict):
        raise UnsupportedPackage(f"{path.name}: holds something else than the tensors of one network.")
    return content, tuple(place), tuple(left_out)


def _choose_key(path: Path, content: dict[Any, Any]) -> Any:
    """Return the usual key, or else the only one, below which tensors lie. Raise UnsupportedPackage."""
    usual = [key for key in USUAL_KEYS if isinstance(content.get(key), dict)]
    if usual:
        # `model` may also be the configuration that a script keeps beside the tensors.
        return next((key for key in usual if _is_state_dict(content[key])), usual[0])
    networks = [key for key, value in content.items() if _is_state_dict(value)]
    if len(networks) != 1:
        raise UnsupportedPackage(f"{path.name}: holds {_describe_content(networks, content)}.")
    return networks[0]


def _describe_content(networks: list[Any], content: dict[Any, Any]) -> str:
    names = ", ".join(map(str, list(networks or content)[:6])) or "nothing"
    found = "several networks" if networks else "something else than the tensors of one network"
    return f"{found} ({names})"


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_plain, value.values()))


def _is_plain(value: object) -> bool:
    """Return whether a value is a tensor whose numbers lie in memory, one by one."""
    if not isinstance(value, Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout is torch.strided and value.device.type == "cpu"


def fit_tensors(tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Return the tensors under the names that an architecture has for them.

    Wrappers put a prefix before all names (`model.`, `_orig_mod.`), which is taken away. Raise BrokenModel, naming what
    differs, where they do not fit.
    """
    expected = describe_tensors(architecture)
    found = _strip_prefix(tensors, expected)
    problems = _list_misfits({name: tuple(tensor.shape) for name, tensor in found.items()}, expected)
    if problems:
        raise BrokenModel(
            f"The weights do not fit {architecture.name} with these arguments: {'; '.join(problems)}. State the "
            "arguments that the network was trained with."
        )
    return found


def _strip_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the tensors without the prefix that all expected names have, or unchanged."""
    parts = next(iter(tensors)).split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        if set(tensors) == {prefix + name for name in expected}:
            return {name: tensors[prefix + name] for name in expected}
    return dict(tensors)


def _list_misfits(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """Return in words which tensors are missing, not expected, or of another shape."""
    differing = [
        f"{name} is {' x '.join(map(str, shape))} where {' x '.join(map(str, expected[name]))} is asked for"
        for name, shape in found.items()
        if shape != expected.get(name, shape)
    ]
    lists = (
        ("missing", [name for name in expected if name not in found]),
        ("not in the network", [name for name in found if name not in expected]),
        ("of another shape", differing),
    )
    return [f"{len(names)} tensors are {what} ({', '.join(names[:2])})" for what, names in lists if names]
