"""Activation checkpointing, which saves memory during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import checkpoint

# Maximum number of convolutions in a checkpointed block, for example a residual unit or half a level of a U-Net. Larger
# blocks store fewer activations, but need more memory during recomputation.
MAX_CONVOLUTIONS_PER_BLOCK = 3


def checkpoint_blocks(network: nn.Module) -> int:
    """Enable activation checkpointing for the blocks of `network` in place, and return the number of blocks.

    Blocks are found by `find_blocks`. Only the inputs of blocks are stored for the backward pass (Chen et al. 2016).
    """
    blocks = find_blocks(network)
    for block in blocks:
        contexts = partial(_make_contexts, block)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return len(blocks)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the largest modules that contain one to three convolutions. Convolutions themselves are not blocks.

    Shared modules are returned once.
    """
    blocks: dict[int, nn.Module] = {}
    for child in network.children():
        convolution_count = sum(isinstance(module, _ConvNd) for module in child.modules())
        if isinstance(child, _ConvNd) or not convolution_count:
            continue
        child_blocks = (
            [child]
            if convolution_count <= MAX_CONVOLUTIONS_PER_BLOCK and not isinstance(child, nn.ModuleList)
            else find_blocks(child)
        )
        blocks |= {id(block): block for block in child_blocks}
    return list(blocks.values())


def _make_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the context managers for the first forward pass and for the recomputation."""
    return nullcontext(), _suspend_statistics(block)


@contextmanager
def _suspend_statistics(block: nn.Module) -> Iterator[None]:
    """Suspend updates of batch normalization statistics within the block.

    The first forward pass has already counted the batch.
    """
    tracking_norms = [norm for norm in block.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    previous_settings = [(norm.momentum, norm.num_batches_tracked) for norm in tracking_norms]
    for norm in tracking_norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (momentum, batch_count) in zip(tracking_norms, previous_settings, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batch_count
