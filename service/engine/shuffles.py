"""Voxels of a block to channels and back, on a CPU, with channels last and several voxels moved as one word.

A permutation of eight axes goes through ATen's slowest loop, one element after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from service import networks
from service.engine.sequences import ordinary

# What the voxels of a block that are beside each other along x are moved as, by their bytes.
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SpaceToDepth(nn.Module):
    """`networks.space_to_depth`, which gives channels last."""

    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        batch, channels, *size = x.shape
        bz, by, bx = self.block
        z, y, w = (edge // step for edge, step in zip(size, self.block, strict=True))
        blocks = x.new_empty(batch, z, y, w, channels, bz, by, bx)
        source = _words(x, bx, (batch, channels, *size[:2], w))
        target = _words(blocks, bx, blocks.shape[:-1])
        for channel, i, j, k in _places(channels, self.block, target):
            target[..., channel, i, j, k].copy_(source[:, channel, i::bz, j::by, :, k])
        return blocks.view(batch, z, y, w, -1).permute(0, 4, 1, 2, 3)


class DepthToSpace(nn.Module):
    """`networks.depth_to_space`, which gives contiguous images."""

    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        batch, channels, z, y, w = x.shape
        bz, by, bx = self.block
        outputs = channels // (bz * by * bx)
        image = x.new_empty(batch, outputs, z * bz, y * by, w * bx)
        source = _words(x.permute(0, 2, 3, 4, 1), bx, (batch, z, y, w, outputs, bz, by))
        target = _words(image, bx, (*image.shape[:-1], w))
        for channel, i, j, k in _places(outputs, self.block, source):
            target[:, channel, i::bz, j::by, :, k].copy_(source[..., channel, i, j, k])
        return image


def replacement(module: nn.Module) -> nn.Module | None:
    """What computes the same faster, None where that is nothing of this file."""
    if ordinary(module, networks.SpaceToDepth):
        return SpaceToDepth(module.block)
    return DepthToSpace(module.block) if ordinary(module, networks.DepthToSpace) else None


def _words(x: Tensor, voxels: int, shape: Sequence[int]) -> Tensor:
    """Elements in order, so many as one if there is a dtype for that: [*shape, words]."""
    word = WORDS.get(voxels * x.element_size())
    flat = x.reshape(-1)
    return (flat if word is None else flat.view(word)).view(*shape, -1)


def _places(channels: int, block: tuple[int, int, int], blocks: Tensor) -> Iterator[tuple[int, ...]]:
    """Channel, and place within a block in words, of everything that is moved at once."""
    return itertools.product(range(channels), range(block[0]), range(block[1]), range(blocks.shape[-1]))
