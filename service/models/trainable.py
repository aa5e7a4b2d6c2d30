"""Which models `service.training` can go on from. Needs no torch."""

from __future__ import annotations

from service.core.errors import BadParameter
from service.models.spec import Instances, ModelSpec


def check_trainable(spec: ModelSpec) -> None:
    """Raise BadParameter for a model that this training has no targets for."""
    decoding = spec.decoding
    roles = (decoding.foreground, decoding.distance) if isinstance(decoding, Instances) else ()
    if spec.outputs != roles or spec.activation != "sigmoid" or spec.input.channels != 1 or spec.architecture is None:
        raise BadParameter(
            f"{spec.name}: only models of one channel with the sigmoid outputs foreground and distance can be trained."
        )
    if spec.architecture.arguments.get("deep_supervision"):
        raise BadParameter(f"{spec.name}: deep_supervision has no targets here; only its last output can be trained.")
    if spec.input.voxel_size is not None:
        raise BadParameter(f"{spec.name}: works at a voxel size of its own, to which training does not resample yet.")
