"""Gradient checkpointing: layers are computed again for the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

# Larger blocks keep less and need more at once while they are computed again; this is a residual unit, or half a level.
CONVOLUTIONS = 3


def recompute(network: nn.Module) -> int:
    """Make every block of `network` keep its input only (Chen et al. 2016), in place; returns how many there are.

    A block is a module that holds up to three convolutions, the largest such.
    """
    found = blocks(network)
    for block in found:
        contexts = partial(_contexts, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return len(found)


def blocks(network: nn.Module) -> list[nn.Module]:
    """The largest modules that hold one to three convolutions and are none themselves; shared ones once."""
    found: dict[int, nn.Module] = {}
    for child in network.children():
        held = sum(isinstance(module, _ConvNd) for module in child.modules())
        if isinstance(child, _ConvNd) or not held:
            continue
        inner = [child] if held <= CONVOLUTIONS and not isinstance(child, nn.ModuleList) else blocks(child)
        found |= {id(block): block for block in inner}
    return list(found.values())


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _counted_once(block)


@contextmanager
def _counted_once(block: nn.Module) -> Iterator[None]:
    """Statistics of batch normalisation took part of this batch when it was computed for the first time."""
    tracking = [norm for norm in block.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in tracking]
    for norm in tracking:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(tracking, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
