"""Voxels of a block to channels and back, on a CPU, with channels last and several voxels moved as one word.

A permutation of eight axes goes through ATen's slowest loop, one element after the other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import Call, Steps
from service.engine.fusion import ordinary
from service.models import architectures

KERNEL = Steps(
    Path(__file__).with_suffix(".cpp"),
    ["stackseg_space_to_depth", "stackseg_depth_to_space"],
    "Voxels are moved into channels several times as slowly",
)


class SpaceToDepth(nn.Module):
    """`networks.space_to_depth`, which gives channels last. Raises OSError where the kernel cannot be compiled."""

    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        KERNEL.load()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        batch, channels, *size = x.shape
        if any(edge % step for edge, step in zip(size, self.block, strict=True)):
            raise RuntimeError(f"{size} voxels are not made of blocks of {list(self.block)}")
        blocks = [edge // step for edge, step in zip(size, self.block, strict=True)]
        y = x.new_empty(batch, *blocks, channels, *self.block)
        sizes = (batch, channels, *blocks, *self.block, x.element_size())
        Call(KERNEL, "stackseg_space_to_depth", (x.contiguous(),), y, sizes).run()
        return y.view(batch, *blocks, -1).permute(0, 4, 1, 2, 3)


class DepthToSpace(nn.Module):
    """`networks.depth_to_space`, which gives contiguous images. Raises OSError where the kernel cannot be compiled."""

    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        KERNEL.load()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        batch, channels, *blocks = x.shape
        bz, by, bx = self.block
        outputs, rest = divmod(channels, bz * by * bx)
        if rest:
            raise RuntimeError(f"{channels} channels are not made of blocks of {list(self.block)}")
        y = x.new_empty(batch, outputs, *(edge * step for edge, step in zip(blocks, self.block, strict=True)))
        sizes = (batch, outputs, *blocks, *self.block, x.element_size())
        x = x.contiguous(memory_format=torch.channels_last_3d)
        Call(KERNEL, "stackseg_depth_to_space", (x,), y, sizes).run()
        return y


def replacement(module: nn.Module) -> nn.Module | None:
    """What computes the same faster, None where that is nothing of this file."""
    if ordinary(module, architectures.SpaceToDepth):
        return SpaceToDepth(module.block)
    return DepthToSpace(module.block) if ordinary(module, architectures.DepthToSpace) else None
