"""Package -> model folder, checked against the package's own tests before it is put in place."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from service.core.errors import BrokenModel, MissingKeys, UnsupportedPackage
from service.core.types import Volume
from service.models.importers import bioimageio, monai_bundle, onnx_package, single_file
from service.models.importers.archives import unpack
from service.models.importers.checkpoint import fit_tensors, read_checkpoint
from service.models.importers.draft import MAX_PACKAGE_BYTES, Draft, PackageTest
from service.models.loader import load_network
from service.models.repository import FILE_NAME, read_spec
from service.models.spec import Architecture, ModelSpec

TOLERANCE = 1e-3
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Errors of readers that a description causes whose values have other types or sizes than they should.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
FORMATS = {"state dict": "torch.save", "torchscript": "TorchScript", "exported": "torch.export", "onnx": "ONNX"}
SUFFIX = {"torchscript": ".ts", "exported": ".pt2", "onnx": ".onnx"}

PrepareImage = Callable[[Volume, ModelSpec], Tensor]
"""Volume [C, Z, Y, X] -> float32 [1, C, z, y, x], normalised and resampled as the model file says."""


class Imported(NamedTuple):
    """The new model, and notes for the operator, one sentence each."""

    spec: ModelSpec
    notes: tuple[str, ...]


def import_model(
    path: Path, models: Path, stated: Mapping[str, Any], *, prepare: PrepareImage, trust: bool = False
) -> Imported:
    """Make `models/<name>` of a package, a folder or a file.

    stated   keys of a model file that override those of the package
    prepare  makes the network's input for the package's own tests
    trust    whether a program may be taken, too, which can do whatever this process can

    Nothing is downloaded, and only networks are run: architectures known by name, and those of torch.export, ONNX and
    trusted TorchScript within the limits of the modules that load them. Raise UnsupportedPackage, naming the field,
    and BrokenModel where the result does not fit together.
    """
    with _read_draft(path) as draft:
        if draft.kind == "torchscript" and not trust:
            raise UnsupportedPackage(
                f"{draft.weights.name}: TorchScript is a program, which can do whatever this process can. Export the "
                "network as ONNX or with torch.export; or, where you trust its author like one of a program that you "
                "install, import it with --trust."
            )
        return _write(draft, models, stated, prepare)


@contextmanager
def _read_draft(path: Path) -> Iterator[Draft]:
    """Yield what a package, a folder or a file says, as long as its files exist. Raise UnsupportedPackage."""
    if not path.exists():
        raise UnsupportedPackage(f"{path}: there is no such file or folder.")
    if single_file.recognises(path):
        yield single_file.read(path)
        return
    with unpack(path, MAX_PACKAGE_BYTES) as root:
        readers = [kind.read for kind in (bioimageio, monai_bundle) if kind.recognises(root)]
        if not readers:
            raise UnsupportedPackage(
                f"{path}: neither a bioimage.io package (rdf.yaml, bioimageio.yaml) nor a MONAI bundle "
                "(configs/metadata.json); a TorchScript program, a file of torch.export or ONNX are single files."
            )
        try:
            draft = readers[0](root)
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise UnsupportedPackage(f"{path.name}: its description does not fit together ({reason}).") from error
        yield draft


def _write(draft: Draft, models: Path, stated: Mapping[str, Any], prepare: PrepareImage) -> Imported:
    """Write a model folder beside `models/<name>`, check it, and move it there."""
    content = _make_content(draft, stated)
    problems = dict.fromkeys(draft.missing, f"{FORMATS[draft.kind]} files do not say it") | draft.problems
    unsettled = {key: problem for key, problem in problems.items() if not _has_key(stated, key)}
    if unsettled:
        raise MissingKeys(f"{draft.weights.name} is {draft.what}", unsettled)
    settled = [
        f"{key} is as you stated it, since what the package says cannot be honoured: {problem}"
        for key, problem in draft.problems.items()
    ]
    target = models / content["name"]
    if target.exists():
        raise UnsupportedPackage(f"{target} is there already; choose another name with --name, or remove it.")
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=models) as scratch:
        folder = Path(scratch) / content["name"]
        folder.mkdir()
        content["weights"] = _store_weights(draft, content.get("architecture"), folder)
        text = yaml.safe_dump({"format": 1, **content}, sort_keys=False, allow_unicode=True)
        (folder / FILE_NAME).write_text(text, encoding="utf-8")
        notes = _check_and_document(draft, folder, prepare, settled)
        folder.rename(target)
    return Imported(read_spec(target), notes)


def _make_content(draft: Draft, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model file but `weights`, in the form that a model file demands."""
    content = _override(draft.content, stated)
    content["name"] = stated.get("name") or _make_slug(str(content["name"]))
    for key in {"summary", "licence", "training_data"} & content.keys():
        if isinstance(content[key], str):
            content[key] = CONTROL_CHARACTERS.sub("", content[key])
    if draft.kind == "state dict" and isinstance(content.get("architecture"), dict):
        arguments = content["architecture"].get("arguments") or {}
        content["input"] = {"channels": arguments.get("in_channels", 1), **content["input"]}
    content["version"] = re.sub(r"[^A-Za-z0-9._-]", "-", str(content["version"]))[:32]
    return content


def _check_and_document(draft: Draft, folder: Path, prepare: PrepareImage, settled: Sequence[str]) -> tuple[str, ...]:
    """Run the package's own tests with the model in `folder`, write its README and return the notes in it."""
    spec = read_spec(folder)
    network = load_network(spec)
    checks = [
        _run_test(network, prepare(Volume.from_array(test.image[0]), spec), spec.activation, test)
        for test in draft.tests
    ]
    notes = (
        *draft.notes,
        *settled,
        *(checks or ["The package has no test of its own; only the shape of its scores was checked."]),
    )
    bullets = "\n".join(f"- {note}" for note in notes)
    (folder / "README.md").write_text(f"# {spec.name}\n\n{spec.summary}\n\n{bullets}\n")
    return notes


def _override(content: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the package's keys with those of the operator in their place, within `input` key by key."""
    merged = {**content, **stated}
    if isinstance(stated.get("input"), Mapping):
        merged["input"] = {**content.get("input", {}), **stated["input"]}
    return merged


def _has_key(stated: Mapping[str, Any], key: str) -> bool:
    """Return whether `stated` has a key such as `input.roi_size`."""
    value: Any = stated
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _make_slug(name: str) -> str:
    """Return `name` as the name of a model may be written."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:64] or "imported"


def _read_architecture(content: Any) -> Architecture:
    try:
        return Architecture.model_validate(content)
    except ValidationError as error:
        raise BrokenModel(f"architecture: a name and arguments are expected, not {content!r:.80}.") from error


def _store_weights(draft: Draft, architecture: Any, folder: Path) -> dict[str, Any]:
    """Write the weights into `folder`, and return the key `weights` of its model file."""
    if draft.kind == "state dict":
        kind, file = "safetensors", folder / "weights.safetensors"
        tensors = fit_tensors(read_checkpoint(draft.weights).tensors, _read_architecture(architecture))
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, file)
    else:
        kind, file = draft.kind, folder / f"weights{SUFFIX[draft.kind]}"
        if kind == "onnx":
            file.write_bytes(onnx_package.embed_external_data(draft.weights))
        else:
            shutil.copyfile(draft.weights, file)
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    trusted = {"trusted": True} if kind == "torchscript" else {}
    return {"kind": kind, "file": file.name, "sha256": digest} | trusted


@torch.inference_mode()
def _run_test(network: torch.nn.Module, image: Tensor, activation: str | None, test: PackageTest) -> str:
    """Compare scores of `image`, the prepared input of `test`, with those expected. Raise BrokenModel."""
    try:
        scores = network(image)
    except (RuntimeError, ValueError) as error:
        raise BrokenModel(f"{test.name}: the network does not take the package's test input: {error}") from error
    if activation == "sigmoid":
        scores = torch.sigmoid(scores)
    elif activation == "softmax":
        scores = torch.softmax(scores, 1)
    if tuple(scores.shape) != test.expected.shape:
        raise BrokenModel(f"{test.name}: gives {tuple(scores.shape)}, the package expects {test.expected.shape}.")
    difference = float(np.abs(scores.numpy() - test.expected).max())
    allowed = TOLERANCE * max(1.0, float(np.abs(test.expected).max()))
    if not difference <= allowed:
        raise BrokenModel(
            f"{test.name}: differs from the package's expected output by {difference:.3g}, more than {allowed:.3g}; "
            "what was understood of it (normalisation, activation, architecture) is not what it means."
        )
    return f"The package's own test {test.name} was reproduced within {difference:.1g}."
