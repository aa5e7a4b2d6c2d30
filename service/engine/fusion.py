"""Modules that follow each other in a network, found without tracing, and their replacement by fused ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn

from service.models.network import is_sequence, iter_children, iter_modules

Kind = TypeVar("Kind", bound=nn.Module)


class ModuleSlot(NamedTuple):
    """A place in a sequence, and the module in it."""

    owner: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        self.owner._modules[self.name] = module


def adjacent_modules(network: nn.Module) -> Iterator[tuple[ModuleSlot, ModuleSlot]]:
    """Yield every two modules that an `nn.Sequential` in `network` calls one after the other.

    Nested sequences count as their modules, unless they have hooks or occur in several places, where different modules
    follow. Modules that do nothing in inference are left out. Replacing while iterating is safe.
    """
    modules = list(iter_modules(network))
    places = Counter(child for module in modules for _, child in iter_children(module))
    for module in modules:
        if is_sequence(module):
            yield from itertools.pairwise(list(_iterate_slots(module, places)))


def fuse_pairs(network: nn.Module, fuse: Callable[[nn.Module, nn.Module], nn.Module | None]) -> nn.Module:
    """Replace every two adjacent modules for which `fuse` returns one by that, in place, and return `network`."""
    for first, second in adjacent_modules(network):
        if (fused := fuse(first.module, second.module)) is not None:
            first.put(fused)
            second.put(nn.Identity())
    return network


def replace_modules(network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace every module within `network` for which `replacement` returns one, in place, and return `network`."""
    if not isinstance(network, torch.jit.ScriptModule):
        for name, child in network.named_children():
            if (other := replacement(child)) is not None:
                network._modules[name] = other
            else:
                replace_modules(child, replacement)
    return network


def is_plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether a module computes what a `kind` does: a subclass with its own forward, or hooks, need not."""
    return isinstance(module, kind) and type(module).forward is kind.forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _iterate_slots(sequence: nn.Module, places: Counter[nn.Module]) -> Iterator[ModuleSlot]:
    for name, child in iter_children(sequence):
        if is_sequence(child) and places[child] == 1 and not _hooked(child):
            yield from _iterate_slots(child, places)
        elif not any(is_plain(child, kind) for kind in (nn.Identity, nn.Dropout, nn.Dropout3d)):
            yield ModuleSlot(sequence, name, child)


def read_slope(activation: nn.Module) -> float | None:
    """Return the factor of a ReLU for negative values; None where that is not one number, or is another function."""
    if is_plain(activation, nn.PReLU) and activation.weight.numel() == 1:
        return activation.weight.item()
    if is_plain(activation, nn.LeakyReLU):
        return activation.negative_slope
    return 0.0 if is_plain(activation, nn.ReLU) else None
