"""The parts of a torch module, and modules that call parts of others in sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


def is_sequence(module: nn.Module) -> bool:
    """Whether it calls its children in turn, and does nothing else; not where `observed` saw them called otherwise."""
    whole = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return whole and not getattr(module, _APART, False)


def parts(network: nn.Module) -> Iterator[nn.Module]:
    """All modules within `network`, itself included, but for TorchScript's, which cannot be changed."""
    return (module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule))


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """With their names; those that it has in several places are there several times."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


@contextmanager
def observed(network: nn.Module) -> Iterator[None]:
    """While `network` runs: see whether it calls its sequences whole, and remember of which that is not so.

    Others than `nn.Sequential` may call the parts of one: all or some of them, in any order, or also besides the whole.
    Not seen are calls of a part's `forward` itself, nor, besides the whole, those of a part that has a place elsewhere
    too: they show when engines are tuned, where results are compared with those of the network as it was.
    """
    modules, calls = list(parts(network)), Counter[nn.Module]()

    def count(module: nn.Module, _given: object) -> None:
        calls[module] += 1

    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for sequence in _taken_apart(modules, calls):
        setattr(sequence, _APART, True)


def _taken_apart(modules: Sequence[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """The sequences among these that were not called, or parts of which were called more often than they."""
    sequences = {module for module in modules if is_sequence(module)}
    # What has a place elsewhere too is called from there.
    elsewhere = {child for module in modules if module not in sequences for _, child in children(module)}
    expected = Counter[nn.Module]()
    for sequence in sequences:
        for _, child in children(sequence):
            expected[child] += calls[sequence]
    more = {child for child in expected if child not in elsewhere and calls[child] > expected[child]}
    return [one for one in sequences if not calls[one] or any(child in more for _, child in children(one))]


# Set on what `is_sequence` no longer counts as one; copies have it too.
_APART = "_stackseg_apart"
