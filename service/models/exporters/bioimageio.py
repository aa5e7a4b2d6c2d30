"""Write bioimage.io packages in format 0.5: a description, weights, and test tensors.

Source: model description 0.5 of the bioimage.io specification.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import nn

from service.core.types import Array
from service.models.exporters.bioimageio_processing import make_postprocessing, make_preprocessing
from service.models.exporters.model_keys import NAME
from service.models.exporters.network_file import INPUT_NAME, OPSET_VERSION, OUTPUT_NAME, Flexibility
from service.models.repository import PICTURE_FILE
from service.models.spec import ActivationName, ModelSpec

FORMAT_VERSION = "0.5.4"
DESCRIPTION_FILE = "rdf.yaml"
TEST_FILES = ("test_input.npy", "test_output.npy")
ONNX_FILE, STATE_FILE = "weights.onnx", "weights.pt"
DOCUMENTATION_FILE = "README.md"
MONAI_MODULE = "monai.networks.nets"
MIN_NAME_LENGTH = 5
CHUNK_BYTES = 2**20
# Common identifiers of the SPDX list. The specification does not allow identifiers that are not on this list.
LICENCES = frozenset(
    [
        *("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unlicense", "MPL-2.0"),
        *("GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-only", "GPL-3.0-or-later", "LGPL-3.0-only"),
        *("LGPL-3.0-or-later", "AGPL-3.0-only", "AGPL-3.0-or-later", "CC0-1.0", "CC-BY-3.0", "CC-BY-4.0"),
        *("CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-3.0", "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", "CC-BY-NC-ND-4.0"),
    ]
)


class PackageContent(NamedTuple):
    """The parts of a package.

    activation     activation that remains to be applied to the scores of the network
    test_arrays    test input [1, C, z, y, x] before normalization, and the expected output [1, K, z, y, x]
    onnx_path      ONNX file of the network
    flexibility    sizes that the ONNX file accepts
    state_network  network of MONAI whose state dict is stored as well; None for other networks
    keys           model keys, from which an import restores the decoding
    """

    spec: ModelSpec
    activation: ActivationName
    test_arrays: tuple[Array, Array]
    onnx_path: Path
    flexibility: Flexibility
    state_network: nn.Module | None
    keys: dict[str, Any]


def write_package(content: PackageContent, path: Path) -> tuple[str, ...]:
    """Write the package as a zip archive. Return notes for the operator.

    Raises UnsupportedPackage if the normalization of the model cannot be described.
    """
    spec, notes = content.spec, list[str]()
    description = _describe_model(content, notes)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        files = _Files(archive)
        axes = _make_axes(content)
        for index, side in enumerate(("inputs", "outputs")):
            with archive.open(TEST_FILES[index], "w", force_zip64=True) as file:
                np.lib.format.write_array(file, content.test_arrays[index], allow_pickle=False)
            description[side] = [
                {
                    "id": (INPUT_NAME, OUTPUT_NAME)[index],
                    "axes": axes[index],
                    "data": {"type": "float32"},
                    "test_tensor": files.refer_to(TEST_FILES[index]),
                }
            ]
        description["inputs"][0]["preprocessing"] = make_preprocessing(spec.input)
        description["outputs"][0]["postprocessing"] = make_postprocessing(content.activation)
        description["weights"] = _write_weights(content, files)
        readme = spec.folder / DOCUMENTATION_FILE
        text = readme.read_text(encoding="utf-8") if readme.is_file() else f"# {spec.name}\n\n{spec.summary}\n"
        archive.writestr(DOCUMENTATION_FILE, text)
        description["documentation"] = DOCUMENTATION_FILE
        if (spec.folder / PICTURE_FILE).is_file():
            archive.write(spec.folder / PICTURE_FILE, PICTURE_FILE)
            description["covers"] = [PICTURE_FILE]
        archive.writestr(DESCRIPTION_FILE, yaml.safe_dump(description, sort_keys=False, allow_unicode=True))
    return tuple(notes)


class _Files:
    """Files in the archive, and their SHA-256."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def add(self, path: Path, name: str) -> dict[str, str]:
        self._archive.write(path, name)
        return self.refer_to(name)

    def refer_to(self, name: str) -> dict[str, str]:
        """Return the entry of a description that refers to a file in the archive."""
        digest = hashlib.sha256()
        with self._archive.open(name) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return {"source": name, "sha256": digest.hexdigest()}


def _describe_model(content: PackageContent, notes: list[str]) -> dict[str, Any]:
    """Return the fields that describe the model as a whole, and add notes about missing ones."""
    spec = content.spec
    description: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "type": "model",
        "name": spec.name if len(spec.name) >= MIN_NAME_LENGTH else f"{spec.name} model",
        "description": spec.summary,
        "tags": ["3d", "segmentation", *spec.input.channel_names],
    }
    if re.fullmatch(r"\d+(\.\d+)*", spec.version):
        description["version"] = spec.version
    if spec.licence in LICENCES:
        description["license"] = spec.licence
    else:
        notes.append(
            f"The licence {spec.licence!r:.80} is not a common SPDX identifier, so the description does not contain it."
        )
    description |= _describe_authors(spec, notes)
    description["config"] = {NAME: content.keys}
    return description


def _describe_authors(spec: ModelSpec, notes: list[str]) -> dict[str, Any]:
    # The specification does not allow slashes in the names of authors, and requires an identifier of each publication.
    authors = [{"name": re.sub(r"[/\\]", " ", name)} for name in spec.authors]
    citations = [citation.model_dump(exclude_none=True) for citation in spec.cite if citation.address]
    missing_options = [option for option, values in (("--author", authors), ("--cite", citations)) if not values]
    if missing_options:
        notes.append(f"The collection of bioimage.io requires authors and citations: use {', '.join(missing_options)}.")
    return ({"authors": authors} if authors else {}) | ({"cite": citations} if citations else {})


def _make_axes(content: PackageContent) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the axes of the input and of the output, whose voxels may be coarser."""
    spec, flexibility = content.spec, content.flexibility
    batch: dict[str, Any] = {"type": "batch"} if flexibility.has_any_batch else {"type": "batch", "size": 1}
    input_names = spec.input.channel_names or tuple(f"channel{index}" for index in range(spec.input.channels))
    axes = tuple([batch, {"type": "channel", "channel_names": list(names)}] for names in (input_names, spec.outputs))
    for index, axis in enumerate("zyx"):
        length = spec.input.roi_size[index]
        size = length if flexibility.multiple is None else {"min": length, "step": flexibility.multiple[index]}
        scale = 1.0 if spec.input.voxel_size is None else spec.input.voxel_size[index]
        unit = {} if spec.input.voxel_size is None else {"unit": "micrometer"}
        axes[0].append({"type": "space", "id": axis, "size": size, "scale": scale, **unit})
        reference = {"tensor_id": INPUT_NAME, "axis_id": axis}
        output_scale = scale * spec.tiling.step[index]
        axes[1].append({"type": "space", "id": axis, "size": reference, "scale": output_scale, **unit})
    return axes[0], axes[1]


def _write_weights(content: PackageContent, files: _Files) -> dict[str, Any]:
    """Write the weights, and return their entries. A MONAI network is stored as a state dict as well."""
    onnx_entry = {**files.add(content.onnx_path, ONNX_FILE), "opset_version": OPSET_VERSION}
    architecture = content.spec.architecture
    if content.state_network is None or architecture is None:
        return {"onnx": onnx_entry}
    state_path = content.onnx_path.with_name(STATE_FILE)
    torch.save(content.state_network.state_dict(), state_path)
    state_entry = {
        **files.add(state_path, STATE_FILE),
        "architecture": {
            "import_from": MONAI_MODULE,
            "callable": architecture.name,
            "kwargs": architecture.arguments,
        },
        "pytorch_version": torch.__version__.partition("+")[0],
    }
    return {"pytorch_state_dict": state_entry, "onnx": {**onnx_entry, "parent": "pytorch_state_dict"}}
