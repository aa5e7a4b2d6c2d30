"""Training of an instance segmentation model on files of annotated stacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.hardware import devices
from service.engine import precision
from service.inference.preprocessing.normalize import normalize_channel
from service.models.architectures.build import build_network
from service.models.loader import load_network
from service.models.repository import MODEL_FILE_NAME
from service.models.spec import Architecture, ModelSpec, check_trainable
from service.training.examples import Pair, read_pairs, split_pairs
from service.training.model_folder import draft_content, write_model
from service.training.training_loop import (
    CHECKPOINT_FILE,
    Trainer,
    TrainerState,
    TrainingData,
    TrainingPlacement,
    TrainingPlan,
)

StackPaths = tuple[Sequence[Path], Sequence[Path]]
"""The files of stacks, and the files of their labels in the same order."""


def prepare_training(
    pairs: Sequence[Pair], settings: Settings, content: dict[str, Any], base: ModelSpec | None
) -> Callable[[Path, torch.dtype], Trainer]:
    """Return a function that creates a trainer for the stacks and labels `pairs`, given a folder and a dtype.

    `content` is the content of the new model file. The device and the number of threads are taken from the settings.
    Raises BadParameter, BrokenModel and ConfigError.
    """
    draft_spec = ModelSpec.model_validate({**content, "weights": {"sha256": "0" * 64}, "folder": Path()})
    check_trainable(draft_spec)
    device = devices.choose_device(settings.device.name)
    plan = TrainingPlan(**settings.training.model_dump())
    if device.type == "cpu":
        devices.set_torch_threads(settings.device.threads)
    else:
        torch.backends.cudnn.deterministic = True
    normalize_image = partial(normalize_channel, normalisation=draft_spec.input.get_normalization(0))
    data = TrainingData(*split_pairs(pairs, settings.training.validation), normalize_image)

    def make_trainer(folder: Path, dtype: torch.dtype) -> Trainer:
        torch.manual_seed(plan.seed)
        network = (
            load_network(base)
            if base is not None
            else build_network(Architecture.model_validate(content["architecture"]))
        )
        _check_crop_size(network, plan.edge)
        return Trainer(network, data, plan, folder, TrainingPlacement(device, dtype))

    return make_trainer


def choose_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype for mixed precision on the configured device."""
    device = devices.choose_device(settings.device.name)
    return precision.choose_precision(settings.engine.precision, devices.list_native_precisions(device)).dtype


def _check_crop_size(network: nn.Module, edge: int) -> None:
    """Raise BadParameter if a network does not support cubes with edges of `edge` voxels."""
    meta_network = copy.deepcopy(network).to("meta")

    def is_supported(length: int) -> bool:
        try:
            meta_network(torch.zeros(2, 1, length, length, length, device="meta"))
        except (RuntimeError, ValueError):
            return False
        return True

    if not is_supported(edge):
        supported_lengths = ", ".join(str(length) for length in range(8, 129, 8) if is_supported(length))
        advice = f"Use one of {supported_lengths}." if supported_lengths else "It supports no cubes up to 128 voxels."
        raise BadParameter(f"--edge {edge}: the network does not support cubes with edges of {edge} voxels. {advice}")


def train_model(
    paths: StackPaths,
    output_folder: Path,
    settings: Settings,
    *,
    base: ModelSpec | None = None,
    resume: bool = False,
) -> tuple[ModelSpec, TrainerState]:
    """Train on stacks and their labels, and create the model folder `output_folder`.

    The device, threads, precision and training options are taken from the settings. Raises BadParameter, BadFile,
    BrokenModel and ConfigError.
    """
    if (output_folder / MODEL_FILE_NAME).exists() or (
        output_folder.exists() and any(output_folder.iterdir()) and not resume
    ):
        raise BadParameter(
            f"{output_folder} is not empty. Choose another folder, or use --resume to continue unfinished training."
        )
    content = draft_content(base, output_folder.name, [path.name for path in paths[0]])
    pairs = read_pairs(*paths)
    make_trainer = prepare_training(pairs, settings, content, base)
    output_folder.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(output_folder, choose_dtype(settings))
    if resume:
        trainer.resume()
    network = trainer.run()
    spec = write_model(network, content, output_folder, pairs[0][0], settings)
    (output_folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return spec, trainer.state
