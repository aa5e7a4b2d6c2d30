"""Convert a package to a model folder, and check the model with the package's own tests."""

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
from service.models.importers import bioimageio, onnx_file, single_file
from service.models.importers.activation import check_activation
from service.models.importers.archives import unpack
from service.models.importers.checkpoint import fit_tensors, list_other_tensors, read_checkpoint
from service.models.importers.draft import MAX_PACKAGE_BYTES, Draft, PackageTest
from service.models.importers.monai import bundle
from service.models.importers.programs import cellpose, nnunet, panseg_export, plantseg, stardist
from service.models.loader import load_network
from service.models.repository import MODEL_FILE_NAME, PICTURE_FILE, read_spec
from service.models.spec import NAME_PATTERN, Architecture, ModelSpec

# Maximum difference from the expected output of a test, for each output relative to its largest absolute expected
# value, or to 1 if all values are smaller. Outputs differ in their scale, as probabilities and distances do.
TEST_TOLERANCE = 1e-3
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Errors that readers raise if values in a description have unexpected types or sizes.
_READ_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
WEIGHTS_SUFFIXES = {"torchscript": ".ts", "exported": ".pt2", "onnx": ".onnx"}

ImagePreparer = Callable[[Volume, ModelSpec], Tensor]
"""Function that normalizes and resamples a volume [C, Z, Y, X] for a model, and returns float32 [1, C, z, y, x]."""


class ImportResult(NamedTuple):
    """The imported model, and notes for the operator. Each note is one sentence."""

    spec: ModelSpec
    notes: tuple[str, ...]


def import_model(
    path: Path, models_folder: Path, overrides: Mapping[str, Any], *, prepare: ImagePreparer, trust: bool = False
) -> ImportResult:
    """Create a model folder in `models_folder` from a package, which is a folder or a file.

    overrides  values of model keys that override the values in the package
    prepare    function that prepares the network's input for the package's own tests
    trust      whether to allow TorchScript files, which are programs that can do everything this process can do

    Nothing is downloaded. The only code that runs is that of the network: a known architecture, or a graph from
    torch.export, ONNX or trusted TorchScript within the limits of its loader. Raises UnsupportedPackage, with the name
    of the field, if a part of the package is not supported, and BrokenModel if the resulting model is inconsistent.
    """
    with _read_draft(path) as draft:
        if draft.kind == "torchscript" and not trust:
            raise UnsupportedPackage(
                f"{draft.weights_path.name}: a TorchScript file is a program that can do everything this process can "
                "do. Export the network as ONNX or with torch.export. If you trust the author of the file as you would "
                "trust the author of a program that you install, import the file with --trust."
            )
        return _write_model_folder(draft, models_folder, overrides, prepare)


@contextmanager
def _read_draft(path: Path) -> Iterator[Draft]:
    """Yield the draft of a package. Files of the draft may exist only within the context. Raises UnsupportedPackage."""
    if not path.exists():
        raise UnsupportedPackage(f"{path} does not exist.")
    if cellpose.is_supported(path):
        yield _read_with(cellpose.read_file, path)
        return
    if single_file.is_supported(path):
        yield single_file.read(path)
        return
    if plantseg.is_supported(path):
        yield _read_with(plantseg.read_file, path)
        return
    with unpack(path, MAX_PACKAGE_BYTES) as root:
        importers = (panseg_export, bioimageio, bundle, nnunet, plantseg, stardist)
        readers = [importer.read for importer in importers if importer.is_package(root)]
        if not readers:
            raise UnsupportedPackage(
                f"{path} is neither a bioimage.io package (rdf.yaml, bioimageio.yaml) nor a MONAI bundle "
                "(configs/metadata.json) nor a model of nnU-Net (plans.json), PlantSeg (best_checkpoint.pytorch) or "
                "StarDist (config.json, weights_best.h5). Models of Cellpose, TorchScript, torch.export and ONNX are "
                "imported as single files."
            )
        yield _read_with(readers[0], root, path.name)


def _read_with(read: Callable[[Path], Draft], path: Path, package_name: str | None = None) -> Draft:
    """Read a draft. Raises UnsupportedPackage if the reader raises any error for inconsistent content."""
    try:
        return read(path)
    except _READ_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedPackage(
            f"The description in {package_name or path.name} is inconsistent ({reason})."
        ) from error


def _write_model_folder(
    draft: Draft, models_folder: Path, overrides: Mapping[str, Any], prepare: ImagePreparer
) -> ImportResult:
    """Write a model folder to a temporary folder inside `models_folder`, check it, and move it to its final path."""
    content = _make_content(draft, overrides)
    problems: dict[str, str | None] = {**dict.fromkeys(draft.missing_keys), **draft.problems}
    unresolved_problems = {key: problem for key, problem in problems.items() if not _has_key(overrides, key)}
    if unresolved_problems:
        raise MissingKeys(f"{draft.weights_path.name} is {draft.description}", unresolved_problems)
    override_notes = [
        f"Your value of {key} is used because the setting in the package is not supported: {problem}"
        for key, problem in draft.problems.items()
    ]
    target = models_folder / content["name"]
    if target.exists():
        raise UnsupportedPackage(f"{target} already exists. Choose another name with --name, or delete that folder.")
    models_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=models_folder) as scratch_folder:
        folder = Path(scratch_folder) / content["name"]
        folder.mkdir()
        weights, weights_notes = _store_weights(draft, content.get("architecture"), folder)
        content["weights"] = weights | _read_output(overrides)
        yaml_text = yaml.safe_dump({"format": 1, **content}, sort_keys=False, allow_unicode=True)
        (folder / MODEL_FILE_NAME).write_text(yaml_text, encoding="utf-8")
        if draft.picture is not None:
            shutil.copyfile(draft.picture, folder / PICTURE_FILE)
        notes = _check_and_document(draft, folder, prepare, [*override_notes, *weights_notes])
        folder.rename(target)
    return ImportResult(read_spec(target), notes)


def _make_content(draft: Draft, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model file except `weights`, converted to valid values."""
    content = _apply_overrides(draft.content, overrides)
    slug = _make_slug(str(overrides.get("name") or content["name"]))
    if (name := overrides.get("name")) and not re.fullmatch(NAME_PATTERN, str(name)):
        raise UnsupportedPackage(
            f"name={str(name)[:80]!r} is not valid. Use up to 64 lower-case letters, digits, - and _, for example"
            f" {slug}."
        )
    content["name"] = name or slug
    for key in {"summary", "licence", "training_data"} & content.keys():
        if isinstance(content[key], str):
            content[key] = CONTROL_CHARACTERS.sub("", content[key])
    if draft.kind == "state dict" and isinstance(content.get("architecture"), dict):
        arguments = content["architecture"].get("arguments") or {}
        content["input"] = {"channels": arguments.get("in_channels", 1), **content["input"]}
    content["version"] = re.sub(r"[^A-Za-z0-9._-]", "-", str(content["version"]))[:32]
    return content


def _check_and_document(
    draft: Draft, folder: Path, prepare: ImagePreparer, override_notes: Sequence[str]
) -> tuple[str, ...]:
    """Run the package's own tests with the model in `folder`, write its README, and return the notes in the README."""
    spec = read_spec(folder)
    network = load_network(spec)
    activation_notes = check_activation(network, spec, is_specified_by_operator="activation" not in draft.content)
    test_notes = [_run_test(network, _prepare_test(test, spec, prepare), spec, test) for test in draft.tests]
    notes = (
        f"The package was read as {draft.description}.",
        *draft.notes,
        *override_notes,
        *activation_notes,
        *(test_notes or ["The package contains no test; only the shape of the scores was checked."]),
    )
    bullets = "\n".join(f"- {note}" for note in notes)
    (folder / "README.md").write_text(f"# {spec.name}\n\n{spec.summary}\n\n{bullets}\n")
    return notes


def _prepare_test(test: PackageTest, spec: ModelSpec, prepare: ImagePreparer) -> Tensor:
    if test.is_normalized:
        return torch.from_numpy(np.array(test.image, np.float32))
    return prepare(Volume.from_array(test.image[0]), spec)


def _apply_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the package's keys with the operator's overrides. Keys in `input` are overridden individually."""
    merged_content = {**content, **overrides}
    if isinstance(overrides.get("input"), Mapping):
        merged_content["input"] = {**content.get("input", {}), **overrides["input"]}
    return merged_content


def _has_key(overrides: Mapping[str, Any], key: str) -> bool:
    """Return whether `overrides` contains a dotted key such as `input.roi_size`."""
    value: Any = overrides
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _make_slug(name: str) -> str:
    """Convert a name to a valid model name."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:64] or "imported"


def _read_output(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only key of `weights` that the operator can specify."""
    keys = overrides.get("weights", {})
    if not isinstance(keys, Mapping) or keys.keys() - {"output"}:
        raise UnsupportedPackage("weights: only the key output can be specified when a model is imported.")
    return dict(keys)


def _read_architecture(content: Any) -> Architecture:
    try:
        return Architecture.model_validate(content)
    except ValidationError as error:
        raise BrokenModel(
            f"architecture: expected a mapping with the keys name and arguments, not {content!r:.80}."
        ) from error


def _store_weights(draft: Draft, architecture: Any, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the weights into `folder`. Return the value of the key `weights` for the model file, and notes."""
    notes = list[str]()
    if draft.kind == "state dict":
        kind, file = "safetensors", folder / "weights.safetensors"
        all_tensors = read_checkpoint(draft.weights_path).tensors if draft.tensors is None else draft.tensors
        tensors = fit_tensors(all_tensors, _read_architecture(architecture))
        if other_names := list_other_tensors(all_tensors, tensors):
            examples = ", ".join(other_names[:3])
            notes.append(f"{len(other_names)} tensors that do not belong to the network were ignored: {examples}.")
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, file)
    else:
        kind, file = draft.kind, folder / f"weights{WEIGHTS_SUFFIXES[draft.kind]}"
        if kind == "onnx":
            file.write_bytes(onnx_file.embed_external_data(draft.weights_path))
        else:
            shutil.copyfile(draft.weights_path, file)
    with file.open("rb") as weights_file:
        digest = hashlib.file_digest(weights_file, "sha256").hexdigest()
    trust_key = {"trusted": True} if kind == "torchscript" else {}
    return {"kind": kind, "file": file.name, "sha256": digest} | trust_key, notes


@torch.inference_mode()
def _run_test(network: torch.nn.Module, image: Tensor, spec: ModelSpec, test: PackageTest) -> str:
    """Compare the scores of `image`, the prepared input of `test`, with the expected output. Raises BrokenModel."""
    try:
        scores = network(image)
    except (RuntimeError, ValueError) as error:
        raise BrokenModel(f"{test.name}: the network does not accept the package's test input: {error}") from error
    if spec.activation == "softmax":
        scores = torch.softmax(scores, 1)
    else:
        is_logit = torch.tensor([spec.get_activation(name) == "sigmoid" for name in spec.outputs])
        scores = torch.where(is_logit[:, None, None, None], torch.sigmoid(scores), scores)
    if tuple(scores.shape) != test.expected_output.shape:
        raise BrokenModel(
            f"{test.name}: the output shape is {tuple(scores.shape)}, but the package expects"
            f" {test.expected_output.shape}."
        )
    axes = (0, 2, 3, 4)
    differences = np.abs(scores.numpy() - test.expected_output).max(axes)
    limits = TEST_TOLERANCE * np.maximum(1.0, np.abs(test.expected_output).max(axes))
    for name, difference, limit in zip(spec.outputs, differences, limits, strict=True):
        if not difference <= limit:
            raise BrokenModel(
                f"{test.name}: the output {name!r} differs from the package's expected output by {difference:.3g}, "
                f"which is more than {limit:.3g}. The normalization, activation or architecture was probably "
                "interpreted incorrectly."
            )
    difference = float(differences.max())
    return f"The package's own test {test.name} was reproduced with a difference of at most {difference:.1g}."
