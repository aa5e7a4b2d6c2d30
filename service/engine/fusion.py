"""Find consecutive modules of a network without tracing it, and replace them with fused modules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn

from service.models.network import is_plain_sequential, iter_children, iter_modules

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ModuleSlot(NamedTuple):
    """A module, with the parent and the name by which it can be replaced."""

    parent: nn.Module
    name: str
    module: nn.Module

    def replace_module(self, module: nn.Module) -> None:
        self.parent._modules[self.name] = module


def iter_adjacent_modules(network: nn.Module) -> Iterator[tuple[ModuleSlot, ModuleSlot]]:
    """Yield every pair of modules that an `nn.Sequential` in `network` calls one after the other.

    The modules of a nested `nn.Sequential` are treated as modules of the outer one, unless the nested one has hooks or
    is used in several places, where different modules follow it. Modules without effect during inference are skipped.
    Modules may be replaced while iterating.
    """
    modules = list(iter_modules(network))
    usage_counts = Counter(child for module in modules for _, child in iter_children(module))
    for module in modules:
        if is_plain_sequential(module):
            yield from itertools.pairwise(list(_iter_slots(module, usage_counts)))


def fuse_pairs(network: nn.Module, fuse: Callable[[nn.Module, nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, every pair of adjacent modules for which `fuse` returns a fused module. Return `network`."""
    for first, second in iter_adjacent_modules(network):
        if (fused_module := fuse(first.module, second.module)) is not None:
            first.replace_module(fused_module)
            second.replace_module(nn.Identity())
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


def is_plain(module: nn.Module, module_class: type[ModuleT]) -> TypeGuard[ModuleT]:
    """Return whether a module has the `forward` of `module_class` and no hooks, so that the results are the same."""
    return isinstance(module, module_class) and type(module).forward is module_class.forward and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _iter_slots(sequential: nn.Module, usage_counts: Counter[nn.Module]) -> Iterator[ModuleSlot]:
    for name, child in iter_children(sequential):
        if is_plain_sequential(child) and usage_counts[child] == 1 and not _has_hooks(child):
            yield from _iter_slots(child, usage_counts)
        elif not any(is_plain(child, module_class) for module_class in (nn.Identity, nn.Dropout, nn.Dropout3d)):
            yield ModuleSlot(sequential, name, child)


def read_slope(activation: nn.Module) -> float | None:
    """Return the negative slope of a ReLU, LeakyReLU or PReLU; None for several slopes or any other module."""
    if is_plain(activation, nn.PReLU) and activation.weight.numel() == 1:
        return activation.weight.item()
    if is_plain(activation, nn.LeakyReLU):
        return activation.negative_slope
    return 0.0 if is_plain(activation, nn.ReLU) else None
