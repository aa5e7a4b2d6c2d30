"""Read nnU-Net v2's folders of trained models: `plans.json`, `dataset.json` and `fold_*/checkpoint_final.pth`.

The weights are permuted to the axes (z, y, x) of the images, so that images need no transposition (`transpose_forward`)
at inference. Source: version 2.8 of the package `nnunetv2`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.core.errors import UnsupportedPackage
from service.models.importers.checkpoint import get_tensors, load_torch_file
from service.models.importers.draft import (
    MAX_PACKAGE_BYTES,
    Draft,
    Fields,
    check_channel_count,
    collect_problem,
    find_file,
    read_mapping,
)
from service.models.importers.programs.nnunet_plans import (
    Plans,
    read_architecture,
    read_normalization,
    read_plans,
)
from service.models.importers.programs.nnunet_resampling import read_voxel_size

CHECKPOINT_NAMES = ("checkpoint_final.pth", "checkpoint_best.pth")
# Second names of the tensors in a checkpoint: every block lists its layers twice, and the decoder contains the encoder.
_BLOCK_ALIAS = re.compile(r"\.all_modules\.\d+\.")
_ENCODER_ALIAS = "decoder.encoder."
FOLD_NAME = re.compile(r"fold_(\d{1,3}|all)")
_HEAD_NAME = re.compile(r"decoder\.seg_layers\.(\d+)\.")
OFFICIAL_TRAINER = re.compile(r"nnUNetTrainer(_\d+epochs?)?(_?NoMirroring|NoDeepSupervision|NoDA|DA5|DAOrd0)?")


def is_package(root: Path) -> bool:
    """Return whether a folder is, or contains, a folder of a trained model, also of nnU-Net 1."""
    return bool(_list_model_folders(root)) or _has_version_1(root)


def _has_version_1(root: Path) -> bool:
    """Return whether a folder contains a model of nnU-Net 1, whose results are in nnUNet/CONFIGURATION/TASK/TRAINER."""
    return any(any(root.glob(f"{folders}plans.pkl")) for folders in ("", "*__*/", "Task*/*__*/", "nnUNet/*/*/*__*/"))


def read(root: Path) -> Draft:
    """Read a trained model into a draft. Raises UnsupportedPackage, with the reason, if it cannot be reproduced."""
    folder, other_folders = _choose_folder(root)
    dataset, folds = read_mapping(find_file(root, f"{folder}/dataset.json")), _read_folds(root, folder)
    plans = read_plans(read_mapping(find_file(root, f"{folder}/plans.json")), folds[0].configuration)
    labels = _read_labels(dataset)
    channel_names = _read_channel_names(dataset)
    architecture = read_architecture(plans, len(channel_names), len(labels.outputs))
    architecture["arguments"]["num_folds"] = len(folds)
    inputs: dict[str, Any] = {
        "channels": len(channel_names),
        "channel_names": channel_names,
        **plans.read_window_settings(architecture),
        "mirror_axes": _read_mirror_axes(folds[0], plans),
    }
    problems, notes = dict[str, str](), _describe_choice(Path(root, folder), folds, other_folders)
    with collect_problem(problems, "input.voxel_size"):
        inputs["voxel_size"], spacing_note = read_voxel_size(plans.configuration, plans.image_axes, plans.reader)
        notes.append(spacing_note)
    with collect_problem(problems, "input.normalisation"):
        inputs["normalisation"] = read_normalization(plans, len(channel_names))
    content: dict[str, Any] = {
        "name": plans.name or Path(root, folder).resolve().parent.name,
        "version": "1",
        "summary": _get_text(dataset, "description", "An nnU-Net model."),
        "licence": _get_text(dataset, "licence", _get_text(dataset, "license", "Not stated.")),
        "training_data": _get_text(dataset, "reference", plans.name or "Not stated."),
        "architecture": architecture,
        "input": inputs,
        "outputs": list(labels.outputs),
        "activation": "softmax" if labels.classes is None else "sigmoid",
        "decoding": {"kind": "classes"} if labels.classes is None else {"kind": "regions", "classes": labels.classes},
    }
    notes += _describe_differences(inputs, folds)
    draft = Draft(content, Path(root, folder, folds[0].file), "state dict", problems=problems, notes=tuple(notes))
    return replace(draft, description="a model of nnU-Net v2", tensors=_merge(folds, plans))


class _Fold(NamedTuple):
    """The checkpoint of one fold.

    file         path relative to the folder of the model
    tensors      tensors of the network, without second names
    mirror_axes  axes of the network along which nnU-Net mirrors windows; empty if it does not
    """

    file: str
    configuration: str
    trainer: str
    mirror_axes: tuple[int, ...]
    tensors: dict[str, Tensor]


class _Labels(NamedTuple):
    """Outputs of the network. `classes` contains the class of each region; None if the outputs exclude each other."""

    outputs: tuple[str, ...]
    classes: list[int] | None


def _list_model_folders(root: Path) -> list[str]:
    """Return the folders with plans and folds, relative to `root`: `root` itself, or up to two levels below it."""
    paths = (path for pattern in ("", "*__*__*/", "Dataset*/*__*__*/") for path in root.glob(f"{pattern}plans.json"))
    folders = (path.parent for path in paths if (path.parent / "dataset.json").is_file())
    return sorted(str(folder.relative_to(root)) for folder in folders if any(folder.glob("fold_*/checkpoint_*.pth")))


def _find_model_folders(root: Path) -> list[str]:
    """Return the folders like `_list_model_folders`. Raises UnsupportedPackage if the only models are of nnU-Net 1."""
    folders = _list_model_folders(root)
    if not folders:
        raise UnsupportedPackage(
            "The folder contains a model of nnU-Net 1 (plans.pkl), which is not supported. Train the model again with "
            "nnU-Net 2, or export its network with torch.onnx.export and import the ONNX file."
        )
    return folders


def _choose_folder(root: Path) -> tuple[str, list[str]]:
    """Return the folder of the model to import, and the other folders of models.

    Raises UnsupportedPackage if the choice is ambiguous, or the only models are of nnU-Net 1. The preferred
    configuration is `3d_fullres`.
    """
    folders = _find_model_folders(root)
    if len(folders) == 1:
        return folders[0], []
    configurations = {folder: folder.rpartition("__")[2] for folder in folders}
    for preferred in ("3d_fullres", "3d_lowres"):
        matches = [folder for folder in folders if configurations[folder] == preferred]
        if len(matches) == 1:
            return matches[0], [folder for folder in folders if folder != matches[0]]
        if matches:
            folders = matches
            break
    raise UnsupportedPackage(f"The folder contains several models. Import one of them: {', '.join(folders[:6])}.")


def _read_folds(root: Path, folder: str) -> list[_Fold]:
    """Return the checkpoints of all folds. Raises UnsupportedPackage if they differ in their configuration."""
    files = _list_checkpoints(root, folder)
    paths = [find_file(root, f"{folder}/{file}") for file in files]
    if sum(path.stat().st_size for path in paths) > MAX_PACKAGE_BYTES:
        raise UnsupportedPackage(f"fold_*: the checkpoints have more than {MAX_PACKAGE_BYTES} bytes in total.")
    folds = [_read_fold(path, file) for path, file in zip(paths, files, strict=True)]
    for fold in folds[1:]:
        if (fold.configuration, fold.mirror_axes) != (folds[0].configuration, folds[0].mirror_axes):
            raise UnsupportedPackage(f"{fold.file}: its configuration or mirroring axes differ from {folds[0].file}.")
    return folds


def _list_checkpoints(root: Path, folder: str) -> list[str]:
    """Return the checkpoints in a folder of all folds, or of `fold_all` if there is no other."""
    candidates = [sorted(Path(root, folder).glob(f"fold_*/{name}")) for name in CHECKPOINT_NAMES]
    names = [path.relative_to(Path(root, folder)) for path in candidates[0] or candidates[1]]
    files = [name.as_posix() for name in names if FOLD_NAME.fullmatch(name.parts[0])]
    files = [file for file in files if not file.startswith("fold_all/")] or files
    if not files:
        raise UnsupportedPackage(f"fold_*: no fold contains {' or '.join(CHECKPOINT_NAMES)}.")
    return files


def _read_fold(path: Path, file: str) -> _Fold:
    content = load_torch_file(path)
    if not isinstance(content, dict) or not isinstance(content.get("network_weights"), dict):
        raise UnsupportedPackage(
            f"{file}: the key network_weights is missing, so it is not a checkpoint of nnU-Net v2."
        )
    fields = Fields(content, file)
    axes = content.get("inference_allowed_mirroring_axes") or ()
    if not isinstance(axes, list | tuple) or not set(axes) <= {0, 1, 2}:
        raise UnsupportedPackage(
            f"{fields.locate('inference_allowed_mirroring_axes')}: expected axes, not {axes!r:.80}."
        )
    return _Fold(
        file,
        fields.get_mapping("init_args").get_string("configuration"),
        fields.get_string("trainer_name", ""),
        tuple(sorted(axes)),
        _remove_second_names(get_tensors(path, content["network_weights"]), file),
    )


def _remove_second_names(tensors: dict[str, Tensor], file: str) -> dict[str, Tensor]:
    """Return the tensors that inference needs, each once. Raises UnsupportedPackage if two names contradict."""
    last_head = max(_get_head(name) or 0 for name in tensors) if tensors else 0
    unique_tensors = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.startswith(_ENCODER_ALIAS):
            if not _is_same_tensor(tensor, tensors.get(name.removeprefix("decoder."))):
                raise UnsupportedPackage(f"{file}: {name} differs from the tensor of the encoder that it repeats.")
        elif not _BLOCK_ALIAS.search(name) and _get_head(name) in {None, last_head}:
            unique_tensors[name] = tensor
    return unique_tensors


def _is_same_tensor(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and (other.data_ptr() == tensor.data_ptr() or torch.equal(other, tensor))


def _get_head(name: str) -> int | None:
    """Return the number of the head of the network to which a tensor belongs; None for all other tensors."""
    match = _HEAD_NAME.match(name)
    return None if match is None else int(match[1])


def _merge(folds: Sequence[_Fold], plans: Plans) -> dict[str, Tensor]:
    """Return the tensors of all folds, with kernels along the axes (z, y, x) of the images."""
    axes = (0, 1, *(2 + axis for axis in plans.image_axes))
    return {
        f"folds.{index}.{name}" if len(folds) > 1 else name: tensor.permute(axes) if tensor.dim() == 5 else tensor
        for index, fold in enumerate(folds)
        for name, tensor in fold.tensors.items()
    }


def _read_mirror_axes(fold: _Fold, plans: Plans) -> list[str]:
    """Return the axes of the images along which nnU-Net mirrors windows."""
    return ["zyx"[index] for index, axis in enumerate(plans.image_axes) if axis in fold.mirror_axes]


def _read_channel_names(dataset: Fields) -> list[str]:
    key = "channel_names" if "channel_names" in dataset else "modality"
    names = dataset.get_mapping(key).as_dict()
    check_channel_count(len(names), dataset.locate(key))
    if set(names) != {str(index) for index in range(len(names))}:
        raise UnsupportedPackage(f"{key}: expected the keys 0 to {len(names) - 1}, not {', '.join(names)!r:.80}.")
    return [re.sub(r"[\x00-\x1f\x7f-\x9f]", "", str(names[str(index)])) for index in range(len(names))]


def _read_labels(dataset: Fields) -> _Labels:
    """Return the outputs of the network: all labels, or all regions if a label consists of several values."""
    values = _read_label_values(dataset)
    if any(len(value) != 1 for value in values.values()):
        return _read_regions(dataset, [name for name, value in values.items() if set(value) != {0}])
    names = {value[0]: name for name, value in values.items()}
    if sorted(names) != list(range(len(values))):
        raise UnsupportedPackage(f"labels: expected the integers 0 to {len(values) - 1}, not {sorted(names)!r:.80}.")
    return _Labels(tuple(names[index] for index in range(len(names))), None)


def _read_label_values(dataset: Fields) -> dict[str, list[int]]:
    """Return the integers of each label, except the ignored one."""
    labels = dataset.get_mapping("labels").as_dict()
    labels.pop("ignore", None)
    values = {name: value if isinstance(value, list) else [value] for name, value in labels.items()}
    numbers = [number for value in values.values() for number in value]
    if values.get("background") != [0] or not all(type(number) is int and 0 <= number < 2**16 for number in numbers):
        raise UnsupportedPackage("labels: expected names with the integers of the labels, and background with 0.")
    check_channel_count(len(values), "labels")
    return values


def _read_regions(dataset: Fields, names: list[str]) -> _Labels:
    """Return regions, which may overlap, with the class that each of them gets in the labels."""
    classes = dataset.get("regions_class_order")
    if not isinstance(classes, list) or len(classes) != len(names):
        raise UnsupportedPackage(f"regions_class_order: expected one label for each of {', '.join(names):.80}.")
    return _Labels(tuple(names), classes)


def _get_text(dataset: Fields, key: str, default: str) -> str:
    """Return a value as text, or `default` if it is missing or empty."""
    value = dataset.get(key)
    return value if isinstance(value, str) and value.strip() else default


def _describe_choice(folder: Path, folds: Sequence[_Fold], other_folders: Sequence[str]) -> list[str]:
    """Return notes about the imported folds and the settings that were ignored."""
    files = ", ".join(fold.file for fold in folds)
    average = f", whose scores are averaged; a window takes {len(folds)} times as long" if len(folds) > 1 else ""
    notes = [f"Imported the configuration {folds[0].configuration} from {files}{average}."]
    used_folds = {fold.file.partition("/")[0] for fold in folds}
    if ignored_folds := [path.name for path in sorted(folder.glob("fold_*")) if path.name not in used_folds]:
        notes.append(
            f"Folds that have no {Path(folds[0].file).name}, and fold_all if there are others, were ignored:"
            f" {', '.join(ignored_folds[:6])}."
        )
    if other_folders:
        notes.append(f"Other models in the folder were not imported: {', '.join(other_folders[:6])}.")
    if not OFFICIAL_TRAINER.fullmatch(folds[0].trainer):
        notes.append(f"If the trainer {folds[0].trainer!r:.80} changes the inference, that change was not imported.")
    return notes


def _describe_differences(inputs: dict[str, Any], folds: Sequence[_Fold]) -> list[str]:
    """Return notes about the settings with which requests reproduce nnU-Net's own results."""
    axes = inputs["mirror_axes"]
    mirroring = f", mirroring along {', '.join(axes)} ({2 ** len(axes)} views)" if axes else ""
    notes = [
        f"Use quality=best for the inference of nnU-Net: an overlap of 0.5{mirroring}. The default is faster.",
        "The rules in nnU-Net's postprocessing.json, such as keeping only the largest component, are not applied.",
    ]
    if inputs["resampling"] == "linear" and inputs.get("voxel_size", True):
        notes.append("Stacks are resampled linearly, because the plans specify other than nnU-Net's default methods.")
    if math.prod(inputs["roi_size"]) * len(folds) > 2**22:
        notes.append("The windows are large, so a service without a GPU needs minutes for a stack.")
    return notes
