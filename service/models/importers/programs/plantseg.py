"""Import checkpoints that PlantSeg, PanSeg or pytorch-3dunet have written, with the `config_train.yml` next to them.

Without this file, the arguments of the network are inferred from its tensors as far as possible, and the operator must
state the others. The networks are in `service.models.architectures.pytorch3dunet`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torch import Tensor

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.importers.checkpoint import Checkpoint, fit_tensors, read_checkpoint
from service.models.importers.draft import Draft, Fields, collect_problem, find_file, read_mapping
from service.models.importers.programs.unet3d_config import (
    predicts_boundaries,
    read_network,
    read_normalization,
    read_patch_size,
)
from service.models.importers.single_file import SIZE_NOTE
from service.models.spec import Architecture

CONFIG_NAME = "config_train.yml"
SUFFIX = ".pytorch"
CHECKPOINT_NAMES = ("best_checkpoint.pytorch", "last_checkpoint.pytorch")
BOUNDARY = "boundary"
MAX_LEVELS = 10
FIRST_MODULE = "encoders.0.basic_module."
# Parts of the names of tensors of residual networks before pytorch-3dunet 1.8.3, which computed other features.
OLD_NAMES = (".upsampling.upsample.weight", ".basic_module.conv1.conv.weight")
HALO_NOTE = (
    "StackSeg blends overlapping windows of the patch size, whereas PlantSeg removes a halo from each patch. In stacks "
    "larger than a patch, the probabilities of both differ, particularly if the network has group norm."
)
ASSUMPTION_NOTE = (
    "The output was assumed to be the probability of a boundary, as in PlantSeg. If it is not, specify --activation, "
    "--outputs and --decoding."
)


def is_package(root: Path) -> bool:
    """Return whether a folder contains a checkpoint of one of the programs."""
    return _find_checkpoint(root) is not None


def read(root: Path) -> Draft:
    """Read the best or else the last checkpoint in a folder. Raises UnsupportedPackage."""
    checkpoint_path = _find_checkpoint(root)
    if checkpoint_path is None:
        raise UnsupportedPackage(f"{root.name}: there is no file {' or '.join(CHECKPOINT_NAMES)}.")
    return read_file(checkpoint_path)


def is_supported(path: Path) -> bool:
    """Return whether `path` is a checkpoint file with the suffix that the programs use."""
    return path.is_file() and path.suffix == SUFFIX


def read_file(path: Path) -> Draft:
    """Read a checkpoint file, and the configuration next to it if there is one. Raises UnsupportedPackage."""
    checkpoint = read_checkpoint(path)
    _check_version(checkpoint)
    if not path.with_name(CONFIG_NAME).is_file():
        return _read_without_config(path, checkpoint)
    config = read_mapping(find_file(path.parent, CONFIG_NAME))
    model = config.get_mapping("model")
    network = read_network(Fields(model.as_dict(), "model"), model.get_string("name"))
    arguments = network.architecture["arguments"]
    content = _describe(path, _read_name(config, path))
    content |= {"architecture": network.architecture, "activation": network.activation}
    content["outputs"] = _name_outputs(arguments["out_channels"])
    inputs, problems, notes = content["input"], dict[str, str](), [*network.notes, HALO_NOTE, SIZE_NOTE]
    with collect_problem(problems, "input.normalisation"):
        inputs["normalisation"], normalization_notes = read_normalization(config, arguments["in_channels"])
        notes += normalization_notes
    with collect_problem(problems, "input.roi_size"):
        inputs |= _read_window(config, checkpoint.tensors)
    _add_decoding(content, problems, config)
    description = "a model of PlantSeg, PanSeg or pytorch-3dunet"
    return Draft(content, path, "state dict", problems=problems, notes=tuple(notes), description=description)


def _find_checkpoint(root: Path) -> Path | None:
    """Return the best, last or only checkpoint in a folder; None if there is none."""
    for name in CHECKPOINT_NAMES:
        if (root / name).is_file():
            return find_file(root, name)
    paths = sorted(path for path in root.glob(f"*{SUFFIX}") if path.is_file())
    return find_file(root, paths[0].name) if len(paths) == 1 else None


def _check_version(checkpoint: Checkpoint) -> None:
    old_name = next((name for name in checkpoint.tensors if name.endswith(OLD_NAMES)), None)
    if old_name is not None:
        raise UnsupportedPackage(
            f"{old_name}: this residual network was trained with pytorch-3dunet before 1.8.3, which is not supported. "
            "Export the network with torch.export or to ONNX."
        )


def _describe(path: Path, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "version": "1",
        "summary": f"Imported from {path.name}, a checkpoint of PlantSeg, PanSeg or pytorch-3dunet.",
        "licence": "Not stated.",
        "training_data": "Not stated.",
        "input": {},
    }


def _read_name(config: Fields | None, path: Path) -> str:
    """Return the name of the checkpoint folder during training, or of the folder or the file."""
    folder = config.get_mapping("trainer").get("checkpoint_dir") if config is not None else None
    if isinstance(folder, str) and PurePosixPath(folder).name not in {"", "..", "CHECKPOINT_DIR"}:
        return PurePosixPath(folder).name
    return path.resolve().parent.name if path.name in CHECKPOINT_NAMES else path.stem


def _name_outputs(count: int) -> list[str]:
    return [BOUNDARY] if count == 1 else [f"output {number}" for number in range(count)]


def _read_window(config: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the window size, and the factor by which the network divides it if the size is a multiple of it."""
    size = read_patch_size(config)
    multiple = 2 ** (_count_levels(tensors) - 1)
    if any(length % multiple for length in size):
        return {"roi_size": size}
    return {"roi_size": size, "roi_multiple": [multiple] * 3}


def _add_decoding(content: dict[str, Any], problems: dict[str, str], config: Fields) -> None:
    """Add the decoding of the outputs, or a problem if the configuration does not specify it."""
    is_single = len(content["outputs"]) == 1
    if content["activation"] == "softmax" and not is_single:
        content["decoding"] = {"kind": "classes"}
    elif content["activation"] == "softmax":
        problems["activation"] = "model.final_sigmoid: the softmax of a single output is constant."
        del content["activation"]
    elif is_single and predicts_boundaries(config):
        content["decoding"] = {"kind": "boundaries", "boundary": BOUNDARY}
    else:
        problems["decoding"] = (
            "loaders: the configuration does not specify how labels are computed from the outputs. Use "
            "'boundaries:NAME' for the name of an output with the probability of a boundary."
        )


def _read_without_config(path: Path, checkpoint: Checkpoint) -> Draft:
    """Return a draft without the settings that the tensors do not determine."""
    network = infer_network(checkpoint.tensors)
    network_phrase = "" if network is None else f". {network.describe()}. PlantSeg uses --normalisation zscore"
    content = _describe(path, _read_name(None, path))
    missing_keys, notes = ["architecture", "input.normalisation", "input.roi_size"], [HALO_NOTE, SIZE_NOTE]
    if network is not None and network.arguments["out_channels"] == 1:
        content |= {"outputs": [BOUNDARY], "activation": "sigmoid"}
        content["decoding"] = {"kind": "boundaries", "boundary": BOUNDARY}
        notes.append(ASSUMPTION_NOTE)
    else:
        missing_keys += ["outputs", "activation", "decoding"]
    description = f"{checkpoint.describe()}, without {CONFIG_NAME} in the same folder{network_phrase}"
    return Draft(
        content, path, "state dict", missing_keys=tuple(missing_keys), notes=tuple(notes), description=description
    )


def _count_levels(tensors: Mapping[str, Tensor]) -> int:
    levels = range(MAX_LEVELS)
    return max(sum(any(name.startswith(f"encoders.{level}.") for name in tensors) for level in levels), 1)


class InferredNetwork(NamedTuple):
    """What the tensors determine of a network of pytorch-3dunet.

    name       class of the network
    arguments  arguments of the network without `layer_order` and `num_groups`
    orders     layer orders that are possible with these tensors
    """

    name: str
    arguments: dict[str, Any]
    orders: list[str]

    def describe(self) -> str:
        """Return a command-line option for the network, and which of its arguments are not known."""
        arguments = {**self.arguments, "layer_order": self.orders[0]}
        call = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        groups_phrase = " or num_groups, which is 8 by default" if "g" in self.orders[0] else ""
        return (
            f"The tensors fit --architecture '{self.name}({call})', but they do not determine layer_order "
            f"({', '.join(self.orders)}){groups_phrase}"
        )


def infer_network(tensors: Mapping[str, Tensor]) -> InferredNetwork | None:
    """Return the network with these tensors. Returns None if it is not one of the networks of pytorch-3dunet."""
    infer = _infer_residual if any(".basic_module.conv3." in name for name in tensors) else _infer_plain
    try:
        network = infer(tensors)
        # The number of groups does not change the shapes of the tensors.
        arguments = {**network.arguments, "layer_order": network.orders[0], "num_groups": 1}
        fit_tensors(tensors, Architecture.model_validate({"name": network.name, "arguments": arguments}))
    except (LookupError, ValueError, BrokenModel):
        return None
    return network


def _infer_residual(tensors: Mapping[str, Tensor]) -> InferredNetwork:
    """Return the residual network. Raises LookupError if a tensor is missing."""
    arguments = _infer_sizes(tensors, "conv1.weight", "conv3.conv.weight")
    has_excitation = any(".se_module." in name for name in tensors)
    return InferredNetwork("ResidualUNetSE3D" if has_excitation else "ResidualUNet3D", arguments, _list_orders(tensors))


def _infer_plain(tensors: Mapping[str, Tensor]) -> InferredNetwork:
    """Return the network without residual connections. Raises LookupError if a tensor is missing."""
    arguments = _infer_sizes(tensors, "SingleConv1.conv.weight", "SingleConv2.conv.weight")
    first_conv, features = tensors.get(FIRST_MODULE + "SingleConv1.conv.weight"), arguments["f_maps"][0]
    # By default, the first of the two convolutions of a level has half as many features as the second one.
    if first_conv is not None and first_conv.shape[0] == features != max(features // 2, arguments["in_channels"]):
        arguments["conv_upscale"] = 1
    if any(".upsampling." in name for name in tensors):
        arguments["upsample"] = "deconv"
    return InferredNetwork("UNet3D", arguments, _list_orders(tensors))


def _infer_sizes(tensors: Mapping[str, Tensor], first_conv: str, last_conv: str) -> dict[str, Any]:
    """Return the numbers of channels and features, from the first and last convolution of each level."""
    modules = [f"encoders.{level}.basic_module." for level in range(_count_levels(tensors))]
    features = [int(tensors[module + last_conv].shape[0]) for module in modules]
    first_weight = tensors.get(FIRST_MODULE + first_conv)
    return {
        "in_channels": features[0] if first_weight is None else int(first_weight.shape[1]),
        "out_channels": int(tensors["final_conv.weight"].shape[0]),
        "f_maps": features,
    }


def _list_orders(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the possible layer orders, from the names of the tensors of the first level in the order of the layers."""
    names = [name for name in tensors if name.startswith(FIRST_MODULE)]
    layers = [name.split(".")[-2] for name in names if name.split(".")[-2] in {"conv", "groupnorm", "batchnorm"}]
    norm = next((layer[0] for layer in layers if layer != "conv"), "")
    if not norm:
        return ["cr", "cl", "ce"]
    orders = ("crg", "cgr", "clg", "cgl", "ceg", "cge") if layers[0] == "conv" else ("gcr", "gcl", "gce")
    return [order.replace("g", norm) for order in orders]
