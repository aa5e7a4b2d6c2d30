"""What follows what in a network, as far as that can be told without tracing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Step(NamedTuple):
    """One module of a sequence, where it can be replaced."""

    owner: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        self.owner._modules[self.name] = module


def steps(module: nn.Module) -> Iterator[Step]:
    """What an `nn.Sequential` calls in turn, sequences within it included; nothing of any other module.

    Those that do nothing in inference are left out.
    """
    if not is_sequence(module):
        return
    for name, child in module.named_children():
        if is_sequence(child):
            yield from steps(child)
        elif not isinstance(child, nn.Identity | nn.Dropout | nn.Dropout3d):
            yield Step(module, name, child)


def is_sequence(module: nn.Module) -> bool:
    """Whether it calls its children in turn, and does nothing else."""
    return type(module).forward is nn.Sequential.forward


def slope(activation: nn.Module) -> float | None:
    """What a rectifier multiplies by what is negative; None where that is not one number, or is something else."""
    if isinstance(activation, nn.PReLU) and activation.weight.numel() == 1:
        return activation.weight.item()
    if isinstance(activation, nn.LeakyReLU):
        return activation.negative_slope
    return 0.0 if isinstance(activation, nn.ReLU) else None
