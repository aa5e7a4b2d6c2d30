"""Training techniques: averaged and interpolated weights, activation checkpointing, and safe convolutions in BF16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim.swa_utils import update_bn
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


@torch.no_grad()
def update_average(
    averaged_network: nn.Module, network: nn.Module, decay: float, statistics_decay: float = 0.0
) -> None:
    """Update the moving averages of the weights and of the batch statistics.

    Without `statistics_decay`, the statistics are copied. They are means over about the last ten batches, so they vary
    more from step to step than the weights.
    """
    for averaged_weights, weights in zip(averaged_network.parameters(), network.parameters(), strict=True):
        averaged_weights.lerp_(weights, 1 - decay)
    for averaged_statistic, statistic in zip(averaged_network.buffers(), network.buffers(), strict=True):
        if statistic.is_floating_point():
            averaged_statistic.lerp_(statistic, 1 - statistics_decay)
        else:
            averaged_statistic.copy_(statistic)


def interpolate_weights(
    initial: Mapping[str, Tensor], trained: Mapping[str, Tensor], fraction: float
) -> dict[str, Tensor]:
    """Return weights and statistics between the initial ones (fraction 0) and the trained ones (fraction 1).

    Fine-tuned networks lose less of what they could do before if they are averaged with their initial weights (Wortsman
    et al. 2022). Counters are those of the trained network.
    """
    return {
        name: initial[name].lerp(value, fraction) if value.is_floating_point() else value
        for name, value in trained.items()
    }


def recompute_statistics(network: nn.Module, images: Iterable[Tensor]) -> None:
    """Recompute batch normalization statistics as plain means over batches [B, 1, z, y, x] with the current weights.

    The statistics from training are means over about the last ten batches, and were computed with weights that are not
    averaged. These statistics are so noisy that the size of segmented objects fluctuates. Izmailov et al. (2018)
    recompute the statistics for the same reason.
    """
    device = next(network.parameters()).device
    update_bn((batch.to(device, memory_format=torch.channels_last_3d) for batch in images), network)


class _SafeConv3d(nn.Conv3d):
    """A 3D convolution that uses float32 for images with more than one plane but fewer planes than the kernel spans.

    For such images, oneDNN computes the BF16 gradient of the weights from uninitialized memory, which results in huge
    or infinite values. This was observed with PyTorch 2.13 on Zen 4.
    """

    def forward(self, x: Tensor, /) -> Tensor:
        """Return the convolution [B, K, z, y, x] of an image [B, C, z, y, x]."""
        kernel_extent = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        if not 1 < x.shape[2] < kernel_extent:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def make_convolutions_safe(network: nn.Module) -> None:
    """Convert all 3D convolutions of `network` to `_SafeConv3d` in place. Tensors and their names do not change."""
    for module in network.modules():
        if type(module) is nn.Conv3d:
            module.__class__ = _SafeConv3d
