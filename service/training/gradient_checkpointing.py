"""Gradient checkpointing: activations are computed again for the backward pass instead of being kept."""

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


def checkpoint_blocks(network: nn.Module) -> int:
    """Make every block of `network` keep its input only (Chen et al. 2016), in place; return the number of blocks.

    A block is one of the largest modules that hold at most three convolutions.
    """
    blocks = find_blocks(network)
    for block in blocks:
        contexts = partial(_contexts, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return len(blocks)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the largest modules that hold one to three convolutions and are none themselves; shared ones once."""
    blocks: dict[int, nn.Module] = {}
    for child in network.children():
        held = sum(isinstance(module, _ConvNd) for module in child.modules())
        if isinstance(child, _ConvNd) or not held:
            continue
        inner = [child] if held <= CONVOLUTIONS and not isinstance(child, nn.ModuleList) else find_blocks(child)
        blocks |= {id(block): block for block in inner}
    return list(blocks.values())


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first forward and of the recomputation."""
    return nullcontext(), _keep_statistics(block)


@contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Leave the statistics of batch normalisation alone: the first forward has counted this batch already."""
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
