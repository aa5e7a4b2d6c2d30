"""What follows what in a network, as far as that can be told without tracing it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn

from service.models.module_tree import is_sequence, iter_children, iter_modules

Kind = TypeVar("Kind", bound=nn.Module)


class Step(NamedTuple):
    """One module of a sequence, where it can be replaced."""

    owner: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        self.owner._modules[self.name] = module


def neighbours(network: nn.Module) -> Iterator[tuple[Step, Step]]:
    """Every two steps that an `nn.Sequential` in `network` calls one after the other, each where it can be replaced.

    Sequences within sequences count as their steps, unless they are in several places, where different steps follow,
    or have hooks. Steps that do nothing in inference are left out. Replacing while iterating is safe.
    """
    modules = list(iter_modules(network))
    places = Counter(child for module in modules for _, child in iter_children(module))
    for module in modules:
        if is_sequence(module):
            yield from itertools.pairwise(list(_steps(module, places)))


def replace(network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Put in the place of every module within `network` what `replacement` has for it, if anything; gives `network`."""
    if not isinstance(network, torch.jit.ScriptModule):
        for name, child in network.named_children():
            if (other := replacement(child)) is not None:
                network._modules[name] = other
            else:
                replace(child, replacement)
    return network


def ordinary(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether it computes what a `kind` does: one of a class with another forward, or with hooks, need not."""
    return isinstance(module, kind) and type(module).forward is kind.forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _steps(sequence: nn.Module, places: Counter[nn.Module]) -> Iterator[Step]:
    for name, child in iter_children(sequence):
        if is_sequence(child) and places[child] == 1 and not _hooked(child):
            yield from _steps(child, places)
        elif not any(ordinary(child, kind) for kind in (nn.Identity, nn.Dropout, nn.Dropout3d)):
            yield Step(sequence, name, child)


def slope(activation: nn.Module) -> float | None:
    """What a rectifier multiplies by what is negative; None where that is not one number, or is something else."""
    if ordinary(activation, nn.PReLU) and activation.weight.numel() == 1:
        return activation.weight.item()
    if ordinary(activation, nn.LeakyReLU):
        return activation.negative_slope
    return 0.0 if ordinary(activation, nn.ReLU) else None
