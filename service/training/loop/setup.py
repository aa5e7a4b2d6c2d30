"""Creation of trainers: the network, the training examples and the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.hardware import devices
from service.engine import precision
from service.models.architectures.build import build_network
from service.models.loader import check_decoding_library, load_network
from service.models.spec import ModelSpec, check_trainable, get_target
from service.models.spec_parts import Boundaries
from service.training.loop.plan import FINE_TUNING_FRACTIONS, FINE_TUNING_RATE, RANDOM_WEIGHTS_RATE, TrainingPlan
from service.training.loop.trainer import Trainer, TrainingData, TrainingPlacement
from service.training.loop.validation import Validator
from service.training.stacks.blocks import BlockDataset
from service.training.stacks.parts import HeldOutParts
from service.training.targets.choice import choose_targets, copy_weights

TrainerFactory = Callable[[Settings, Path, torch.dtype], Trainer]
"""Function that creates a trainer, given settings with the training options, a folder and a dtype."""


def make_draft_spec(content: dict[str, Any]) -> ModelSpec:
    """Return the spec of a model whose weights do not exist yet. Raises BadParameter if it cannot be trained."""
    spec = ModelSpec.model_validate({**content, "weights": {"sha256": "0" * 64}, "folder": Path()})
    check_trainable(spec)
    return spec


def prepare_training(
    parts: HeldOutParts, settings: Settings, draft: ModelSpec, base: ModelSpec | None
) -> TrainerFactory:
    """Return a function that creates trainers for parts of annotated stacks.

    draft  spec of the new model
    base   model that provides the initial weights; None for random weights

    The device and the number of threads are taken from the settings. Raises BadParameter, BrokenModel and ConfigError.
    """
    device = devices.choose_device(settings.device.name)
    if device.type == "cpu":
        devices.set_torch_threads(settings.device.threads)
    else:
        torch.backends.cudnn.deterministic = True
    check_decoding_library(draft)
    edge, seed = settings.training.edge, settings.training.seed
    # Objects with a diameter have the same extents along all axes, but are blurred differently along z.
    permutes_axes = isinstance(draft.decoding, Boundaries)
    dataset = BlockDataset(parts.training, edge, seed, choose_targets(draft).compute, permutes_axes=permutes_axes)
    data = TrainingData(dataset, Validator(parts.validation, draft, edge))

    def make_trainer(trainer_settings: Settings, folder: Path, dtype: torch.dtype) -> Trainer:
        torch.manual_seed(seed)
        network = _build_network(draft, base)
        _check_crop_size(network, edge)
        options = trainer_settings.training.model_dump()
        options["learning_rate"] = options["learning_rate"] or (FINE_TUNING_RATE if base else RANDOM_WEIGHTS_RATE)
        # Weights halfway between those for different targets would be meaningless.
        fractions = FINE_TUNING_FRACTIONS if base is not None and get_target(base) == get_target(draft) else ()
        plan = TrainingPlan(**options, fractions=fractions)
        return Trainer(network, data, plan, folder, TrainingPlacement(device, dtype))

    return make_trainer


def _build_network(draft: ModelSpec, base: ModelSpec | None) -> nn.Module:
    """Return the network of a new model with the weights of the base model; random if there are none.

    If the new model has other outputs, their weights are random.
    """
    if draft.architecture is None:
        raise TypeError(f"The model {draft.name} has no architecture.")
    if base is not None and base.architecture == draft.architecture:
        return load_network(base)
    network = build_network(draft.architecture)
    if base is not None:
        copy_weights(load_network(base), network)
    return network


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
