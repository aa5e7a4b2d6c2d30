"""Read a model of Cellpose 1 to 3: a file of tensors, usually without a suffix, as `CPnet.save_model` writes it.

Other files of Cellpose are recognized to refuse them by name: denoising models, transformers, and size models.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from service.core.errors import UnsupportedPackage
from service.core.files.zip_archive import ARCHIVE_ERRORS, open_torch_archive
from service.models.importers.checkpoint import fit_tensors, read_checkpoint
from service.models.importers.draft import Draft
from service.models.spec import Architecture

FIRST_LAYER = "downsample.down.res_down_0.conv.conv_0.2.weight"
LAST_LAYER = "output.2.weight"
# Names of tensors that only networks of Cellpose contain, in the pickle of a file.
NETWORK_MARKER = FIRST_LAYER.encode()
DIAMETER_MARKER = b"diam_labels"
NUMPY_HEADER = b"\x93NUMPY"
# Maximum size of the part of a file that describes its tensors.
MAX_DESCRIPTION_BYTES = 2**24
# Object diameters in voxels to which Cellpose resamples, if the file does not contain one. The published model for
# nuclei is always used with its own.
DEFAULT_DIAMETER, NUCLEI_DIAMETER = 30.0, 17.0
NUCLEI_FILE = "nucleitorch_0"
# Diameters that are plausible in a file.
MIN_DIAMETER, MAX_DIAMETER = 1.0, 1000.0
# Planes per window, and edge lengths of a tile.
WINDOW = (4, 224, 224)
FLOW_OUTPUTS = ("flow z", "flow y", "flow x")
CHANNELS_NOTE = (
    "The network has {} channels, of which stacks provide the first; the others are zero. To segment two channels "
    "(cytoplasm, then nuclei), import the file with --channels 2."
)
DIAMETER_NOTE = "The file does not contain the diameter of the training objects, so {:g} voxels are assumed."
DEFAULT_NOTE = (
    "If a request does not specify a diameter, objects are assumed to be {:.3g} voxels wide, like those that the model "
    "was trained on."
)


def is_supported(path: Path) -> bool:
    """Return whether a file contains tensors of Cellpose, or parameters of one of its size models."""
    if not path.is_file():
        return False
    if path.suffix == ".npy" and path.name.startswith("size_"):
        return True
    description = _read_description(path)
    return NETWORK_MARKER in description or DIAMETER_MARKER in description


def _read_description(path: Path) -> bytes:
    """Return the pickle that lists the tensors of a file; empty if there is none. The pickle is not interpreted."""
    if not zipfile.is_zipfile(path):
        return b""
    try:
        with open_torch_archive(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not names or archive.getinfo(names[0]).file_size > MAX_DESCRIPTION_BYTES:
                return b""
            return archive.read(names[0])
    except (OSError, LookupError, UnsupportedPackage, *ARCHIVE_ERRORS):
        return b""


def read_file(path: Path) -> Draft:
    """Read a model into a draft. Raises UnsupportedPackage if it is damaged or of another kind."""
    if path.suffix == ".npy":
        raise UnsupportedPackage(
            f"{path.name} is a size model of Cellpose, which estimates the object diameter and contains no network. "
            "Import the model that it belongs to, and specify the diameter in requests."
        )
    all_tensors = read_checkpoint(path).tensors
    _check_kind(path, all_tensors)
    architecture = _read_architecture(all_tensors)
    tensors = fit_tensors(
        {name: tensor for name, tensor in all_tensors.items() if not name.startswith("diam_")},
        Architecture.model_validate(architecture),
    )
    diameter, default_diameter, notes = _read_diameters(path, all_tensors)
    channels = architecture["arguments"]["in_channels"]
    if channels > 1:
        notes.append(CHANNELS_NOTE.format(channels))
    content: dict[str, Any] = {
        # The suffix of a model without a name is a time.
        "name": path.stem if re.fullmatch(r"\.[A-Za-z]+", path.suffix) else path.name,
        "version": "1",
        "summary": "Objects whose voxels flow to the same place (Cellpose).",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "architecture": architecture,
        "input": {
            "channels": 1,
            "diameter": diameter,
            "default_diameter": f"{default_diameter:g}px",
            "normalisation": {"kind": "percentile", "low": 1.0, "high": 99.0},
            "roi_size": list(WINDOW),
        },
        "outputs": ["object", *FLOW_OUTPUTS],
        "activation": {"object": "sigmoid", **dict.fromkeys(FLOW_OUTPUTS, "none")},
        "decoding": {"kind": "flows"},
    }
    return Draft(content, path, "state dict", notes=tuple(notes), description="a model of Cellpose", tensors=tensors)


def _check_kind(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedPackage for models of Cellpose other than those that segment with a residual network."""
    if FIRST_LAYER not in tensors or LAST_LAYER not in tensors:
        if "W2" in tensors or any(name.startswith("encoder.") for name in tensors):
            raise UnsupportedPackage(
                f"{path.name} is a model of Cellpose 4 (Cellpose-SAM), which is not supported: its transformer has 300 "
                "million parameters, and its training data permit only noncommercial use (CC-BY-NC). Import a model of "
                "Cellpose 1 to 3, such as cyto3 or nuclei."
            )
        raise UnsupportedPackage(
            f"{path.name} is a model of Cellpose without a residual network, such as transformer_cp3, which is not"
            " supported. Import a model with the default backbone, such as cyto3 or nuclei."
        )
    if tensors[FIRST_LAYER].dim() != 4:
        raise UnsupportedPackage(f"{path.name} is a model of Cellpose with 3D convolutions, which is not supported.")
    num_outputs = tensors[LAST_LAYER].shape[0] if tensors[LAST_LAYER].dim() else 0
    if num_outputs != 3:
        raise UnsupportedPackage(
            f"{path.name} is a model of Cellpose with {num_outputs} outputs instead of 3. Denoising, deblurring and"
            " upsampling models do not segment images. Import a model such as cyto3 or nuclei."
        )


def _read_architecture(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the value of the key `architecture`, from the shapes of the tensors."""
    features, kernel_size = list[int](), tensors[FIRST_LAYER].shape[-1]
    while (name := f"downsample.down.res_down_{len(features)}.conv.conv_0.2.weight") in tensors:
        features.append(tensors[name].shape[0] if tensors[name].dim() else 0)
    arguments = {"in_channels": tensors[FIRST_LAYER].shape[1], "features": features, "kernel_size": kernel_size}
    return {"name": "CellposeNet", "arguments": arguments}


def _read_diameters(path: Path, tensors: Mapping[str, Tensor]) -> tuple[float, float, list[str]]:
    """Return the diameter to which Cellpose resamples, that of the training objects, and notes."""
    notes = list[str]()
    diameter = _read_number(path, tensors, "diam_mean")
    if path.name == NUCLEI_FILE:
        diameter = NUCLEI_DIAMETER
    elif diameter is None:
        diameter = NUCLEI_DIAMETER if "nuclei" in path.name.lower() else DEFAULT_DIAMETER
        notes.append(DIAMETER_NOTE.format(diameter))
    default_diameter = _read_number(path, tensors, "diam_labels") or diameter
    return diameter, default_diameter, [*notes, DEFAULT_NOTE.format(default_diameter)]


def _read_number(path: Path, tensors: Mapping[str, Tensor], name: str) -> float | None:
    """Return a diameter in the file; None if it is missing. Raises UnsupportedPackage for implausible values."""
    if name not in tensors:
        return None
    values = tensors[name].flatten()
    if len(values) != 1 or not MIN_DIAMETER <= (value := float(values[0])) <= MAX_DIAMETER:
        raise UnsupportedPackage(
            f"{path.name}: {name}: expected one diameter from {MIN_DIAMETER:g} to {MAX_DIAMETER:g} voxels."
        )
    return value
