"""A torch network: its type once it runs, its size, its modules, and which `nn.Sequential` run in sequence."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Network = Callable[[Tensor], Tensor]
"""A network ready to run: windows [B, C, z, y, x] -> scores [B, K, z, y, x], of one fixed shape."""

# Most elements of a value: as float32 they take 8 GiB, and a file asks for any number in a few bytes.
MAX_ELEMENTS = 2**31
# Set on an `nn.Sequential` that `is_sequence` must not count as one; copies have it too.
_BYPASSED = "_stackseg_bypassed"


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of parameters and buffers of `network`; tensors that share memory count once."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_sequence(module: nn.Module) -> bool:
    """Return whether `module` only calls its children in turn, and `observe_calls` saw nothing to the contrary."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not getattr(module, _BYPASSED, False)


def iter_modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield `network` and all modules within it, except those of TorchScript, which cannot be changed."""
    return (module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule))


def iter_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and child; a child under several names comes several times, unlike with `named_children`."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


@contextmanager
def observe_calls(network: nn.Module) -> Iterator[None]:
    """Count calls of modules while `network` runs, and mark every `nn.Sequential` whose children others call.

    A module may use parts of an `nn.Sequential` that it owns: some of them, in another order, or besides the whole.
    Two cases stay unseen: direct calls of a child's `forward`, and, besides calls of the whole, calls of a child that
    has another parent too. Tuning catches both, because it compares an engine's scores with the original network's.
    """
    modules, calls = list(iter_modules(network)), Counter[nn.Module]()

    def count(module: nn.Module, _inputs: object) -> None:
        calls[module] += 1

    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for sequence in _find_bypassed(modules, calls):
        setattr(sequence, _BYPASSED, True)


def _find_bypassed(modules: Sequence[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """Return the sequences that were never called, or of which a child was called more often than its sequences were.

    Fusing such a sequence would change the network, because something reads values from between its children. A child
    that also has a parent which is no sequence is exempt from the count: the parent makes the additional calls.
    """
    sequences = [module for module in modules if is_sequence(module)]
    others = set(modules).difference(sequences)
    exempt = {child for module in others for _, child in iter_children(module)}
    called_elsewhere = (calls - _count_calls_by(sequences, calls)).keys() - exempt
    return [
        sequence
        for sequence in sequences
        if not calls[sequence] or any(child in called_elsewhere for _, child in iter_children(sequence))
    ]


def _count_calls_by(sequences: Sequence[nn.Module], calls: Counter[nn.Module]) -> Counter[nn.Module]:
    """Return how often each child is called where sequences alone call it."""
    counts = Counter[nn.Module]()
    for sequence in sequences:
        for _, child in iter_children(sequence):
            counts[child] += calls[sequence]
    return counts
