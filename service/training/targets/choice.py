"""The targets of a training run: what a network learns from labels, with its loss and its model file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from service.core.errors import BadParameter
from service.models.spec import ModelSpec, TargetName
from service.models.spec_parts import Boundaries
from service.training.examples import TargetFunction
from service.training.targets.boundaries import AFFINITY_OFFSETS, BoundaryLoss, compute_label_targets
from service.training.targets.instances import compute_instance_targets, instance_loss

# Decoding of new models for boundaries, before its parameters are chosen on the validation parts.
BOUNDARY_DECODING = Boundaries(kind="boundaries", watershed_weight_sigma=0.0)


class Targets(NamedTuple):
    """What a network learns.

    compute  returns targets [T, Z, Y, X], float32, for labels [Z, Y, X]
    loss     returns the scalar loss of raw scores [B, K, z, y, x] for targets [B, T, z, y, x]
    """

    compute: TargetFunction
    loss: Callable[[Tensor, Tensor], Tensor]


def choose_targets(spec: ModelSpec) -> Targets:
    """Return the targets for the decoding of a model."""
    if isinstance(spec.decoding, Boundaries):
        return Targets(compute_label_targets, BoundaryLoss(spec.decoding.affinities))
    return Targets(compute_instance_targets, instance_loss)


def set_target(content: dict[str, Any], target: TargetName) -> dict[str, Any]:
    """Return the content of the model file of a network that learns another target than its base model.

    Boundaries have no diameter, so stacks are used at their original resolution. Raises BadParameter if the target is
    `instances`, or if the number of outputs of the network cannot be changed.
    """
    if target == "instances":
        raise BadParameter(
            f"{content['name']}: the base model predicts boundaries, so it cannot be trained with target=instances."
            " Start from another model, such as nuclei.",
            parameter="target",
        )
    offsets = AFFINITY_OFFSETS if target == "affinities" else ()
    architecture = content.get("architecture") or {}
    arguments = architecture.get("arguments", {})
    if "out_channels" not in arguments:
        raise BadParameter(
            f"{content['name']}: the number of outputs of the base model cannot be changed for target={target}. Start"
            " from another model, such as nuclei or membranes.",
            parameter="target",
        )
    names = ["boundary", *("affinity_" + "_".join(map(str, offset)) for offset in offsets)]
    kept_input = {
        name: value
        for name, value in content["input"].items()
        if name not in {"diameter", "default_diameter", "estimate_diameter"}
    }
    return content | {
        "architecture": architecture | {"arguments": arguments | {"out_channels": len(names)}},
        "input": kept_input,
        "outputs": names,
        "activation": "sigmoid",
        "decoding": BOUNDARY_DECODING.model_copy(update={"affinities": offsets}).model_dump(mode="json"),
    }


def copy_weights(source: nn.Module, network: nn.Module) -> None:
    """Copy the weights and statistics that have the same name and shape in both networks: all but the outputs."""
    own = network.state_dict()
    network.load_state_dict(
        own | {name: value for name, value in source.state_dict().items() if own.get(name, value).shape == value.shape}
    )
