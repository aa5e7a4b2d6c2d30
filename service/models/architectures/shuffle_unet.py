"""The network of the bundled models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn


def space_to_depth(x: Tensor, block: Sequence[int]) -> Tensor:
    """Move each block of voxels into channels: [B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
    batch, channels, *size = x.shape
    bz, by, bx = block
    z, y, w = (length // b for length, b in zip(size, block, strict=True))
    x = x.reshape(batch, channels, z, bz, y, by, w, bx).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels * bz * by * bx, z, y, w)


def depth_to_space(x: Tensor, block: Sequence[int]) -> Tensor:
    """Invert `space_to_depth`: [B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx].

    This is the pixel shuffle of Shi et al. 2016, extended to three dimensions.
    """
    batch, channels, z, y, w = x.shape
    bz, by, bx = block
    out_channels = channels // (bz * by * bx)
    x = x.reshape(batch, out_channels, bz, by, bx, z, y, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(batch, out_channels, z * bz, y * by, w * bx)


class _BlockShuffle(nn.Module):
    """Base class for pixel-shuffle modules. Engines can replace these modules. `block` is (bz, by, bx)."""

    def __init__(self, block: Sequence[int]) -> None:
        super().__init__()
        bz, by, bx = block
        self.block = (bz, by, bx)


class SpaceToDepth(_BlockShuffle):
    """`space_to_depth` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Rearrange [B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        return space_to_depth(x, self.block)


class DepthToSpace(_BlockShuffle):
    """`depth_to_space` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Rearrange [B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        return depth_to_space(x, self.block)


class _DoubleConv(nn.Sequential):
    """Two blocks, each with a 3x3x3 convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        layers: list[nn.Module] = []
        for channels in (in_channels, out_channels):
            layers += [
                nn.Conv3d(channels, out_channels, 3, padding=1, bias=False),
                nn.BatchNorm3d(out_channels),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class ShuffleUNet(nn.Module):
    """U-Net (Cicek et al. 2016) that works on blocks of voxels and shuffles its scores back to individual voxels.

    A full-resolution convolution of a single channel makes poor use of matrix units. Therefore, `space_to_depth` first
    moves each block of voxels into channels, and the top layers run at 1 / prod(block) of the positions. Skip
    connections are added instead of concatenated, which halves the cost of the first convolutions in the decoder. Every
    spatial size of the input must be a multiple of block * 2 ** (len(widths) - 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (32, 48, 96, 96),
        block: Sequence[int] = (2, 2, 2),
    ) -> None:
        super().__init__()
        block_voxels = math.prod(block)
        self.unfold, self.fold = SpaceToDepth(block), DepthToSpace(block)
        levels = list(itertools.pairwise(widths))
        self.stem = _DoubleConv(in_channels * block_voxels, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(upper_width, lower_width, 2, stride=2, bias=False),
                nn.BatchNorm3d(lower_width),
                nn.ReLU(inplace=True),
                _DoubleConv(lower_width, lower_width),
            )
            for upper_width, lower_width in levels
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(lower_width, upper_width, 2, stride=2) for upper_width, lower_width in levels
        )
        self.merge = nn.ModuleList(_DoubleConv(upper_width, upper_width) for upper_width, _ in levels)
        self.head = nn.Conv3d(widths[0], out_channels * block_voxels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores [B, out_channels, z, y, x] from an image [B, in_channels, z, y, x]."""
        features = [self.stem(self.unfold(x))]
        for down in self.down:
            features.append(down(features[-1]))
        decoded = features.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            # Add in place, because allocating memory for the sum takes longer than the addition.
            decoded = merge(up(decoded).add_(features.pop()))
        scores: Tensor = self.fold(self.head(decoded))
        return scores
