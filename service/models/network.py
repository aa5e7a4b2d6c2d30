"""Utilities for torch networks: their type, size and modules.

`observe_calls` detects `nn.Sequential` modules whose children are also called in other ways.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Network = Callable[[Tensor], Tensor]
"""A network that is ready to run: windows [B, C, z, y, x] -> scores [B, K, z, y, x], for one fixed shape."""

# Maximum number of elements in a tensor, which takes 8 GiB as float32. Untrusted files could specify any number.
MAX_ELEMENTS = 2**31
# Attribute that marks every `nn.Sequential` that `is_plain_sequential` must reject. Copies of the module retain it.
_BYPASSED_ATTRIBUTE = "_stackseg_bypassed"


def count_weight_bytes(network: nn.Module) -> int:
    """Return the size of the parameters and buffers of `network` in bytes. Shared memory is counted once."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether `module` only calls its children in order, and `observe_calls` found no other calls to them."""
    is_plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_plain and not getattr(module, _BYPASSED_ATTRIBUTE, False)


def iter_modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield `network` and all modules within it, except those of TorchScript, which cannot be changed."""
    return (module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule))


def iter_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and children of a module. Unlike `named_children`, yield a child once for each of its names."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


@contextmanager
def observe_calls(network: nn.Module) -> Iterator[None]:
    """Count calls to modules while `network` runs, and mark every `nn.Sequential` whose children are called elsewhere.

    A module may call the children of an `nn.Sequential` itself: only some of them, in a different order, or in addition
    to the whole sequence. Two cases are not detected: direct calls to a child's `forward`, and additional calls to a
    child that also has another parent. Tuning catches both, because it compares the scores of an engine with those of
    the original network.
    """
    modules, calls = list(iter_modules(network)), Counter[nn.Module]()

    def count_call(module: nn.Module, _inputs: object) -> None:
        calls[module] += 1

    hooks = [module.register_forward_pre_hook(count_call) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for sequence in _find_bypassed_sequences(modules, calls):
        setattr(sequence, _BYPASSED_ATTRIBUTE, True)


def _find_bypassed_sequences(modules: Sequence[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """Return the sequences that were never called, or that have a child that was called more often than its sequences.

    Fusing such a sequence would change the network, because the tensors between its children are used elsewhere. A
    child that also has a parent other than a sequence is exempt, because that parent makes the additional calls.
    """
    sequences = [module for module in modules if is_plain_sequential(module)]
    other_modules = set(modules).difference(sequences)
    exempt_modules = {child for module in other_modules for _, child in iter_children(module)}
    bypassed_children = (calls - _count_calls_by_sequences(sequences, calls)).keys() - exempt_modules
    return [
        sequence
        for sequence in sequences
        if not calls[sequence] or any(child in bypassed_children for _, child in iter_children(sequence))
    ]


def _count_calls_by_sequences(sequences: Sequence[nn.Module], calls: Counter[nn.Module]) -> Counter[nn.Module]:
    """Return how many times each child was called by its sequences."""
    counts = Counter[nn.Module]()
    for sequence in sequences:
        for _, child in iter_children(sequence):
            counts[child] += calls[sequence]
    return counts
