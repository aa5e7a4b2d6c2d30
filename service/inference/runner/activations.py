"""Memory that the activations of a network take, measured by one forward pass or guessed."""

from __future__ import annotations

import math

import torch
from torch import nn

from service.models.module_tree import iter_modules


def activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Measure the bytes of float32 activations for one input of `shape`; see `measure_activations`."""
    with torch.inference_mode():
        return measure_activations(network, torch.zeros(shape))[1]


def measure_activations(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the scores of `network` for `x`, and the bytes of its activations: the sum of its five largest.

    About five of the largest outputs of layers live at once.
    """
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * 4)

    leaves = [module for module in iter_modules(network) if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        scores: torch.Tensor = network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return scores, sum(sorted(sizes)[-5:]) if leaves else typical_activation_bytes(tuple(x.shape))


def typical_activation_bytes(shape: tuple[int, ...]) -> int:
    """Return what `activation_bytes` gives for a typical network, with 32 channels at full resolution."""
    return 5 * 32 * 4 * math.prod((shape[0], *shape[2:]))
