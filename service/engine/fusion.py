"""Find consecutive modules of a network without tracing it, and replace them with fused modules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn

from service.models.network import is_plain_sequential, iter_children, iter_modules

Kind = TypeVar("Kind", bound=nn.Module)


class ModuleSlot(NamedTuple):
    """A module, and its parent and name, by which it can be replaced."""

    owner: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        self.owner._modules[self.name] = module


def iter_adjacent_modules(network: nn.Module) -> Iterator[tuple[ModuleSlot, ModuleSlot]]:
    """Yield every pair of modules that an `nn.Sequential` in `network` calls one after the other.

    A nested sequence counts as the modules in it, unless it has hooks or is used in several places, where different
    modules follow it. Modules without effect during inference are skipped. Modules may be replaced while iterating.
    """
    modules = list(iter_modules(network))
    usages = Counter(child for module in modules for _, child in iter_children(module))
    for module in modules:
        if is_plain_sequential(module):
            yield from itertools.pairwise(list(_iter_slots(module, usages)))


def fuse_pairs(network: nn.Module, fuse: Callable[[nn.Module, nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, every pair of adjacent modules for which `fuse` returns a fused module. Return `network`."""
    for first, second in iter_adjacent_modules(network):
        if (fused_module := fuse(first.module, second.module)) is not None:
            first.put(fused_module)
            second.put(nn.Identity())
    return network


def replace_modules(network: nn.Module, make_replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, every submodule for which `make_replacement` returns a module. Return `network`."""
    if not isinstance(network, torch.jit.ScriptModule):
        for name, child in network.named_children():
            if (new_module := make_replacement(child)) is not None:
                network._modules[name] = new_module
            else:
                replace_modules(child, make_replacement)
    return network


def is_plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Return whether a module computes exactly what `kind` does: it has no hooks and does not override `forward`."""
    return isinstance(module, kind) and type(module).forward is kind.forward and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _iter_slots(sequence: nn.Module, usages: Counter[nn.Module]) -> Iterator[ModuleSlot]:
    for name, child in iter_children(sequence):
        if is_plain_sequential(child) and usages[child] == 1 and not _has_hooks(child):
            yield from _iter_slots(child, usages)
        elif not any(is_plain(child, kind) for kind in (nn.Identity, nn.Dropout, nn.Dropout3d)):
            yield ModuleSlot(sequence, name, child)


def read_slope(activation: nn.Module) -> float | None:
    """Return the negative slope of a ReLU, LeakyReLU or PReLU, or None for several slopes or any other module."""
    if is_plain(activation, nn.PReLU) and activation.weight.numel() == 1:
        return activation.weight.item()
    if is_plain(activation, nn.LeakyReLU):
        return activation.negative_slope
    return 0.0 if is_plain(activation, nn.ReLU) else None
