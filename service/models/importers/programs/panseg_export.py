"""Import bioimage.io packages whose network is one of pytorch-3dunet, such as those that PanSeg exports after training.

Such a package contains a state dict, the name of the network and its arguments, and usually a copy of the Python file
that defines the network. This file is never read: the name and the arguments select a network of
`service.models.architectures.pytorch3dunet`, which has to reproduce the package's own test.

PanSeg's exports differ from other packages in three ways: the axes have names such as `z_in`, the network applies its
activation itself, and the test input has already been normalized.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.core.errors import UnsupportedPackage
from service.models.importers import bioimageio
from service.models.importers.draft import Draft, Fields
from service.models.importers.monai.arguments import is_positive_number
from service.models.importers.programs.plantseg import BOUNDARY
from service.models.importers.programs.unet3d_config import read_network

NAMES = ("UNet3D", "ResidualUNet3D", "ResidualUNetSE3D")
MODULE = "pytorch3dunet"
VOXEL_SIZE_NOTE = (
    "The network was trained on voxels of {} um (z, y, x). Stacks are used at their original resolution unless you "
    "specify --voxel-size."
)


def is_package(root: Path) -> bool:
    """Return whether a folder is a bioimage.io package with a network of pytorch-3dunet."""
    if not bioimageio.is_package(root):
        return False
    rdf, _ = bioimageio.read_description(root)
    return _find_name(_get_entry(rdf)) is not None


def read(root: Path) -> Draft:
    """Read a package into a draft. Raises UnsupportedPackage if it is damaged or its network cannot be used."""
    rdf, _ = bioimageio.read_description(root)
    draft = bioimageio.read(root, _adapt_description)
    content, problems, notes = dict(draft.content), dict(draft.problems), list(draft.notes)
    is_export = _has_panseg_axes(rdf)
    tags = rdf.get("tags") if isinstance(rdf.get("tags"), list) else []
    if len(content["outputs"]) == 1 and "boundaries" in tags:
        content["outputs"], content["decoding"] = [BOUNDARY], {"kind": "boundaries", "boundary": BOUNDARY}
        problems.pop("decoding", None)
    if is_export:
        scales = [axis.get("scale", 1.0) for axis in rdf.get("inputs")[0]["axes"][2:]]
        if all(map(is_positive_number, scales)):
            notes.append(VOXEL_SIZE_NOTE.format(", ".join(f"{scale:g}" for scale in scales)))
    tests = tuple(test._replace(is_normalized=is_export) for test in draft.tests)
    description = "a bioimage.io package of PanSeg"
    return replace(draft, content=content, problems=problems, notes=tuple(notes), tests=tests, description=description)


def _get_entry(rdf: Fields) -> Fields:
    return rdf.get_mapping("weights").get_mapping("pytorch_state_dict")


def _find_name(entry: Fields) -> str | None:
    """Return the name of the network of pytorch-3dunet in an entry for weights, or None for any other network."""
    architecture = entry.get("architecture")
    if isinstance(architecture, dict):
        module, name = str(architecture.get("import_from", "")), str(architecture.get("callable"))
        is_original = not module or module.startswith((MODULE, "plantseg", "panseg"))
    else:
        match = re.fullmatch(r"[\w./-]*[.:](\w+)", str(architecture))
        is_original, name = not str(architecture).startswith("monai"), match[1] if match else ""
    return name if is_original and name in NAMES else None


def _has_panseg_axes(rdf: Fields) -> bool:
    axes = rdf.get_mappings("inputs")[0].get("axes")
    return isinstance(axes, list) and any(isinstance(axis, dict) and axis.get("id") == "z_in" for axis in axes)


def _adapt_description(rdf: Fields) -> Fields:
    """Return the description with the usual names of axes, a translated network, and its activation as a step."""
    content: dict[str, Any] = copy.deepcopy(rdf.as_dict())
    for side, suffix in (("inputs", "_in"), ("outputs", "_out")):
        for index, tensor in enumerate(rdf.get_mappings(side)):
            content[side][index]["axes"] = _rename_axes(tensor, suffix)
    entry = _get_entry(rdf)
    name = _find_name(entry) or ""
    version_has_mapping = isinstance(entry.get("architecture"), dict)
    parent = entry.get_mapping("architecture") if version_has_mapping else entry
    kwargs = Fields({"in_channels": 1, "out_channels": 1, **parent.get_mapping("kwargs").as_dict()}, "kwargs")
    network = read_network(kwargs, name)
    output = rdf.get_mappings("outputs")[0]
    if output.get_mappings("postprocessing"):
        raise UnsupportedPackage(f"{output.locate('postprocessing')}: the network already includes its activation.")
    content["outputs"][0]["postprocessing"] = [{"id": network.activation, "name": network.activation}]
    weights_entry = content["weights"]["pytorch_state_dict"]
    if version_has_mapping:
        weights_entry["architecture"] = {"import_from": MODULE, "callable": name}
        weights_entry["architecture"]["kwargs"] = network.architecture["arguments"]
    else:
        weights_entry |= {"architecture": f"{MODULE}.{name}", "kwargs": network.architecture["arguments"]}
    return Fields(content)


def _rename_axes(tensor: Fields, suffix: str) -> Any:
    """Return the axes of a tensor without the suffix that PanSeg adds to their names."""
    if not isinstance(tensor.get("axes"), list):
        return tensor.get("axes")
    axes = [axis.as_dict() for axis in tensor.get_mappings("axes")]
    return [
        {**axis, "id": axis["id"].removesuffix(suffix)} if isinstance(axis.get("id"), str) else axis for axis in axes
    ]
