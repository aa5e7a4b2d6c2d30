"""Techniques of training: averaged weights, gradient checkpointing, and convolutions that are right in BF16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim.swa_utils import update_bn
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


@torch.no_grad()
def update_average(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the network's; batch statistics are averages already and are copied."""
    for averaged, current in zip(average.parameters(), network.parameters(), strict=True):
        averaged.lerp_(current, 1 - decay)
    for statistic, latest in zip(average.buffers(), network.buffers(), strict=True):
        statistic.copy_(latest)


def measure_statistics(network: nn.Module, images: Iterable[Tensor]) -> None:
    """Set the statistics of batch normalisation to plain means over batches [B, 1, z, y, x], for the current weights.

    Training accumulates means over about the last ten batches, of weights that were not averaged. They are so noisy
    that outlines grow and shrink from one minute to the next (Izmailov et al. 2018 measure anew for the same reason).
    """
    device = next(network.parameters()).device
    update_bn((batch.to(device, memory_format=torch.channels_last_3d) for batch in images), network)


class _SafeConv3d(nn.Conv3d):
    """A 3D convolution that computes in float32 where its image has fewer planes than its kernel, but several.

    There oneDNN's gradient of the weights in BF16 holds whatever was in memory, with torch 2.13 on Zen 4: infinite
    now and then, huge otherwise.
    """

    def forward(self, x: Tensor, /) -> Tensor:
        """Return the convolution [B, K, z, y, x] of an image [B, C, z, y, x]."""
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        if not 1 < x.shape[2] < reach:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def make_convolutions_safe(network: nn.Module) -> None:
    """Make every 3D convolution of `network` a `_SafeConv3d`, in place; tensors and their names stay as they are."""
    for module in network.modules():
        if type(module) is nn.Conv3d:
            module.__class__ = _SafeConv3d
