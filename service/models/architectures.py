"""Architectures that a model file may name, and how one is built."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.spec import Architecture


def space_to_depth(x: Tensor, block: Sequence[int]) -> Tensor:
    """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx], every block of voxels becoming channels."""
    batch, channels, *size = x.shape
    bz, by, bx = block
    z, y, w = (edge // b for edge, b in zip(size, block, strict=True))
    x = x.reshape(batch, channels, z, bz, y, by, w, bx).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels * bz * by * bx, z, y, w)


def depth_to_space(x: Tensor, block: Sequence[int]) -> Tensor:
    """The inverse of `space_to_depth` (sub-pixel shuffle of Shi et al. 2016, in three dimensions)."""
    batch, channels, z, y, w = x.shape
    bz, by, bx = block
    outputs = channels // (bz * by * bx)
    x = x.reshape(batch, outputs, bz, by, bx, z, y, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(batch, outputs, z * bz, y * by, w * bx)


class _Shuffle(nn.Module):
    """Moves voxels of blocks [bz, by, bx] into channels or back, as a module that an engine can replace."""

    def __init__(self, block: Sequence[int]) -> None:
        super().__init__()
        bz, by, bx = block
        self.block = (bz, by, bx)


class SpaceToDepth(_Shuffle):
    """`space_to_depth`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        return space_to_depth(x, self.block)


class DepthToSpace(_Shuffle):
    """`depth_to_space`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        return depth_to_space(x, self.block)


class _Block(nn.Sequential):
    """Twice 3x3x3 convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv3d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm3d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class ShuffleUNet(nn.Module):
    """U-Net (Cicek et al. 2016) that works on blocks of voxels and shuffles its scores back to single voxels.

    The widest layers of a U-Net are those at full resolution, and a convolution that reads one channel keeps a matrix
    unit idle. Here `space_to_depth` turns each block of voxels into channels first, so that the layers at the
    top run on 1 / prod(block) of the positions. Skip connections are added, which halves the decoder's first
    convolutions. Every edge of the input must be a multiple of block * 2 ** (len(widths) - 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (32, 48, 96, 96),
        block: Sequence[int] = (2, 2, 2),
    ) -> None:
        super().__init__()
        factor = math.prod(block)
        self.unfold, self.fold = SpaceToDepth(block), DepthToSpace(block)
        levels = list(itertools.pairwise(widths))
        self.stem = _Block(in_channels * factor, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(above, below, 2, stride=2, bias=False),
                nn.BatchNorm3d(below),
                nn.ReLU(inplace=True),
                _Block(below, below),
            )
            for above, below in levels
        )
        self.up = nn.ModuleList(nn.ConvTranspose3d(below, above, 2, stride=2) for above, below in levels)
        self.merge = nn.ModuleList(_Block(above, above) for above, _ in levels)
        self.head = nn.Conv3d(widths[0], out_channels * factor, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, z, y, x] -> [B, out_channels, z, y, x]."""
        features = [self.stem(self.unfold(x))]
        for down in self.down:
            features.append(down(features[-1]))
        top = features.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            # In place: fresh memory for another sum costs more than the sum.
            top = merge(up(top).add_(features.pop()))
        scores: Tensor = self.fold(self.head(top))
        return scores


def _from_monai(name: str) -> Callable[..., nn.Module]:
    """Makes MONAI's network of that name. Importing MONAI takes longer than all that a model of ours needs to start."""

    def make(**arguments: Any) -> nn.Module:
        constructors: dict[str, Callable[..., nn.Module]] = import_module(
            "service.models.monai_architectures"
        ).CONSTRUCTORS
        return constructors[name](**arguments)

    return make


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "ShuffleUNet": ShuffleUNet,
    **{name: _from_monai(name) for name in ("UNet", "BasicUNet", "DynUNet", "SegResNet")},
}


def build(architecture: Architecture) -> nn.Module:
    """A freshly initialised network, float32 on the CPU. Raises BrokenModel for unknown names and bad arguments."""
    constructor = ARCHITECTURES.get(architecture.name)
    if constructor is None:
        raise BrokenModel(f"There is no architecture {architecture.name!r}; known are {', '.join(ARCHITECTURES)}.")
    try:
        return constructor(**architecture.arguments)
    except (TypeError, ValueError, IndexError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise BrokenModel(f"{architecture.name} does not take the arguments in the model file: {error}") from error
