"""Read a model of Cellpose: a file of tensors, usually without a suffix, as Cellpose writes it.

The network is the residual U-Net of Cellpose 1 to 3, or the transformer of Cellpose-SAM. Other files of Cellpose are
recognized to refuse them by name: denoising models, other transformers, and size models.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from service.core.errors import UnsupportedPackage
from service.core.files.zip_archive import ARCHIVE_ERRORS, open_torch_archive
from service.models.importers.checkpoint import fit_tensors, read_checkpoint
from service.models.importers.draft import Draft
from service.models.spec import Architecture

FIRST_LAYER = "downsample.down.res_down_0.conv.conv_0.2.weight"
LAST_LAYER = "output.2.weight"
POSITIONS = "encoder.pos_embed"
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
# Names that Cellpose 1 gives to its models, whose files contain no diameters. Neither do files of Omnipose.
CELLPOSE_1_NAME = re.compile(r"(cyto2?|nuclei)torch_\d|cellpose_residual_")
# Part of the name that Cellpose 1 and 2 give to a model without a style. Its tensors are those of a model with a style.
STYLE_OFF = "style_off"
# Diameters that are plausible in a file.
MIN_DIAMETER, MAX_DIAMETER = 1.0, 1000.0
# Outputs of Omnipose for planes: two flows, the distance and the boundary.
NUM_OMNIPOSE_OUTPUTS = 4
# Planes per window, and edge lengths of a tile of the residual network.
NUM_PLANES, TILE = 4, 224
FLOW_OUTPUTS = ("flow z", "flow y", "flow x")
CHANNELS_NOTE = (
    "The network has {} channels, of which stacks provide the first; the others are zero. To segment two channels "
    "(cytoplasm, then nuclei), import the file with --channels 2."
)
SAM_NOTE = (
    "Cellpose-SAM finds objects of different sizes: if a request does not specify a diameter, the planes keep their "
    "resolution. Cellpose's own weights permit only noncommercial use (CC BY-NC 4.0)."
)
DIAMETER_NOTE = "The file does not contain the diameter of the training objects, so {:g} voxels are assumed."
DEFAULT_NOTE = (
    "If a request does not specify a diameter, objects are assumed to be {:.3g} voxels wide, like those that the model "
    "was trained on."
)


class _Network(NamedTuple):
    """Description of a network: architecture, tiles, and object diameters in voxels."""

    program: str
    architecture: dict[str, Any]
    tile: int
    tiles: Literal["fitted", "fixed"]
    diameter: float
    default_diameter: float
    notes: Sequence[str]


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
    network = (_read_sam if POSITIONS in all_tensors else _read_residual_network)(path, all_tensors)
    tensors = fit_tensors(
        {name: tensor for name, tensor in all_tensors.items() if not name.startswith("diam_")},
        Architecture.model_validate(network.architecture),
    )
    notes = list(network.notes)
    if (channels := network.architecture["arguments"]["in_channels"]) > 1:
        notes.append(CHANNELS_NOTE.format(channels))
    content: dict[str, Any] = {
        # The suffix of a model without a name is a time.
        "name": path.stem if re.fullmatch(r"\.[A-Za-z]+", path.suffix) else path.name,
        "version": "1",
        "summary": "Objects whose voxels flow to the same place (Cellpose).",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "architecture": network.architecture,
        "input": {
            "channels": 1,
            "diameter": network.diameter,
            "default_diameter": f"{network.default_diameter:g}px",
            "normalisation": {"kind": "percentile", "low": 1.0, "high": 99.0},
            "roi_size": [NUM_PLANES, network.tile, network.tile],
        },
        "outputs": ["object", *FLOW_OUTPUTS],
        "activation": {"object": "sigmoid", **dict.fromkeys(FLOW_OUTPUTS, "none")},
        "decoding": {"kind": "flows", "tiles": network.tiles},
    }
    description = f"a model of {network.program}"
    return Draft(content, path, "state dict", notes=tuple(notes), description=description, tensors=tensors)


def _check_kind(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedPackage for models of Cellpose that do not segment, or whose network is not known."""
    if "encoder.cls_token" in tensors:
        raise UnsupportedPackage(
            f"{path.name} is a model of Cellpose-DINO, which is not supported. Import cpsam_v2, cpsam or cyto3."
        )
    if POSITIONS in tensors:
        return
    if FIRST_LAYER not in tensors or LAST_LAYER not in tensors:
        raise UnsupportedPackage(
            f"{path.name} is a model of Cellpose with a network that is not supported, such as transformer_cp3. Import "
            "a model with the default network, such as cpsam_v2, cyto3 or nuclei."
        )
    if tensors[FIRST_LAYER].dim() != 4:
        raise UnsupportedPackage(f"{path.name} is a model of Cellpose with 3D convolutions, which is not supported.")
    _check_outputs(path, tensors[LAST_LAYER].shape[0] if tensors[LAST_LAYER].dim() else 0)
    if STYLE_OFF in path.name:
        raise UnsupportedPackage(
            f"{path.name}: according to its name, this network of Cellpose 1 or 2 was trained without a style, which is"
            " not supported. Train it with the default network. If it has a style, rename the file without"
            f" '{STYLE_OFF}'."
        )
    if not {"diam_mean", "diam_labels"} & tensors.keys() and not CELLPOSE_1_NAME.match(path.name):
        raise UnsupportedPackage(
            f"{path.name} contains no object diameter, so it is from Cellpose 1 or Omnipose. Models of Omnipose"
            " predict distances instead of the probability of objects, and are not supported. If it is a model of"
            " Cellpose 1, rename the file so that its name begins with 'cellpose_residual_', as Cellpose 1 does."
        )


def _check_outputs(path: Path, num_outputs: int) -> None:
    """Raise UnsupportedPackage for residual networks whose outputs are not those of Cellpose."""
    if num_outputs == NUM_OMNIPOSE_OUTPUTS or "omni" in path.name.lower():
        # Networks of Omnipose without an output for boundaries have the same tensors as those of Cellpose.
        raise UnsupportedPackage(
            f"{path.name} is a model of Omnipose, which predicts distances instead of the probability of objects, and "
            "is not supported. Import a model of Cellpose such as cyto3. If it is not a model of Omnipose, rename the "
            "file without 'omni'."
        )
    if num_outputs != 3:
        raise UnsupportedPackage(
            f"{path.name} is a model of Cellpose with {num_outputs} outputs instead of 3. Denoising, deblurring and"
            " upsampling models do not segment images. Import a model such as cyto3 or nuclei."
        )


def _read_residual_network(path: Path, tensors: Mapping[str, Tensor]) -> _Network:
    """Read the network of Cellpose 1 to 3 from the shapes of its tensors."""
    features, kernel_size = list[int](), tensors[FIRST_LAYER].shape[-1]
    while (name := f"downsample.down.res_down_{len(features)}.conv.conv_0.2.weight") in tensors:
        features.append(tensors[name].shape[0] if tensors[name].dim() else 0)
    arguments = {"in_channels": tensors[FIRST_LAYER].shape[1], "features": features, "kernel_size": kernel_size}
    architecture = {"name": "CellposeNet", "arguments": arguments}
    return _Network("Cellpose", architecture, TILE, "fitted", *_read_diameters(path, tensors))


def _read_sam(path: Path, tensors: Mapping[str, Tensor]) -> _Network:
    """Read the transformer of Cellpose-SAM from the shapes of its tensors. Raises UnsupportedPackage."""
    tables = list[int]()
    while (name := f"encoder.blocks.{len(tables)}.attn.rel_pos_h") in tensors:
        tables.append(len(tensors[name]))
    try:
        features, in_channels, _, patch_size = tensors["encoder.patch_embed.proj.weight"].shape
        num_tokens = tensors[POSITIONS].shape[1]
        arguments = {
            "patch_size": patch_size,
            "num_tokens": num_tokens,
            "features": features,
            "head_features": tensors["encoder.blocks.0.attn.rel_pos_h"].shape[1],
            "hidden_features": len(tensors["encoder.blocks.0.mlp.lin1.weight"]),
            "neck_features": len(tensors["encoder.neck.0.weight"]),
            "table_lengths": tables,
            "in_channels": in_channels,
        }
    except (LookupError, ValueError, TypeError) as error:
        raise UnsupportedPackage(
            f"{path.name} looks like a model of Cellpose-SAM, but tensors are missing or have unexpected shapes. Save "
            "the model with Cellpose 4 again."
        ) from error
    architecture, tile = {"name": "CellposeSam", "arguments": arguments}, patch_size * num_tokens
    return _Network("Cellpose-SAM", architecture, tile, "fixed", DEFAULT_DIAMETER, DEFAULT_DIAMETER, [SAM_NOTE])


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
