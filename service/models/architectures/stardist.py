"""The networks of StarDist 3D (`stardist.models.StarDist3D`), with the semantics of Keras.

Both map windows [B, C, z, y, x] to scores [B, 1 + R, z / g, y / g, x / g], where g is the grid: the logit of the object
probability, and the distance to the outline of the object along R rays. The window must be a multiple of the grid and,
for the U-Net, of its pooling. Convolutions are registered in the order in which Keras creates them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from service.models.spec_parts import FrozenModel

# Keras's default, which StarDist does not change.
BATCH_NORM_EPSILON = 1e-3
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}
Triple = tuple[int, int, int]
ActivationName = Literal["elu", "linear", "relu", "selu", "sigmoid", "softplus", "softsign", "swish", "tanh"]
# Limits for untrusted settings, far above those of any useful network.
Channels = Annotated[int, Field(ge=1, le=4096)]
Count = Annotated[int, Field(ge=1, le=32)]
KernelLength = Annotated[int, Field(ge=1, le=31)]
Factor = Annotated[int, Field(ge=1, le=64)]
STEM_KERNELS = ((7, 7, 7), (3, 3, 3))
"""Kernels of the first two convolutions of the residual network."""


def make_convolution(
    in_channels: int, out_channels: int, kernel_size: Triple, stride: Triple = (1, 1, 1), *, bias: bool = True
) -> nn.Module:
    """Return a convolution with Keras's padding "same", for inputs that are multiples of the stride.

    If the number of padding voxels is odd, there is one more after the image than before it. A plain `nn.Conv3d` is
    returned if the padding is symmetric.
    """
    z, y, x = (max(length - step, 0) for length, step in zip(kernel_size, stride, strict=True))
    if z % 2 == y % 2 == x % 2 == 0:
        return nn.Conv3d(in_channels, out_channels, kernel_size, stride, (z // 2, y // 2, x // 2), bias=bias)
    padding = nn.ConstantPad3d((x // 2, x - x // 2, y // 2, y - y // 2, z // 2, z - z // 2), 0.0)
    return nn.Sequential(padding, nn.Conv3d(in_channels, out_channels, kernel_size, stride, bias=bias))


def list_pools(grid: Triple) -> Iterator[Triple]:
    """Yield the pooling factors that reduce the image to the grid, as StarDist chooses them.

    Raises ValueError for a grid that StarDist cannot reach: every number must be a power of two.
    """
    pooled = [1, 1, 1]
    while pooled != list(grid):
        z, y, x = (1 + (length > current) for length, current in zip(grid, pooled, strict=True))
        pooled = [current * factor for current, factor in zip(pooled, (z, y, x), strict=True)]
        if any(current > length for current, length in zip(pooled, grid, strict=True)):
            raise ValueError(f"the grid {tuple(grid)} must consist of powers of two")
        yield z, y, x


class NetworkSettings(FrozenModel):
    """Settings of both networks, named as in `stardist.models.Config3D` without the prefix of the backbone.

    n_rays      number of rays
    grid        number of voxels along (z, y, x) that one score stands for
    net_conv    channels of the convolution before the heads; 0: none
    """

    in_channels: Channels = 1
    n_rays: Channels
    grid: tuple[Factor, Factor, Factor] = (1, 1, 1)
    kernel_size: tuple[KernelLength, KernelLength, KernelLength] = (3, 3, 3)
    n_filter_base: Channels = 32
    activation: ActivationName = "relu"
    batch_norm: bool = False
    net_conv: Annotated[int, Field(ge=0, le=4096)] = 128


class UNetSettings(NetworkSettings):
    """Settings of `StarDistUNet`."""

    n_depth: Annotated[int, Field(ge=0, le=8)] = 2
    n_conv_per_depth: Count = 2
    pool: tuple[Factor, Factor, Factor] = (2, 2, 2)
    last_activation: ActivationName = "relu"
    expansion: Annotated[float, Field(gt=0, le=16)] = 2

    def compute_receptive_radii(self) -> Triple:
        """Return the distance (z, y, x), in voxels, beyond which a voxel does not affect a score."""
        # Only the levels of the U-Net have convolutions on both sides of the pooling.
        levels = [*((pool, 1) for pool in list_pools(self.grid)), *[(self.pool, 2)] * self.n_depth]

        def compute_radius(axis: int) -> int:
            scale, radius, half = 1, 0, self.kernel_size[axis] // 2
            for pool, num_sides in levels:
                radius += num_sides * scale * (self.n_conv_per_depth * half + pool[axis] - 1)
                scale *= pool[axis]
            return radius + scale * self.n_conv_per_depth * half + self.grid[axis] * half

        return compute_radius(0), compute_radius(1), compute_radius(2)

    def count_channels(self, level: int) -> int:
        """Return the number of channels at a resolution level."""
        return int(self.n_filter_base * self.expansion ** max(level, 0))


class ResNetSettings(NetworkSettings):
    """Settings of `StarDistResNet`."""

    n_blocks: Count = 4
    n_conv_per_block: Annotated[int, Field(ge=2, le=32)] = 3

    def compute_receptive_radii(self) -> Triple:
        """Return the distance (z, y, x), in voxels, beyond which a voxel does not affect a score."""
        pools = list(list_pools(self.grid))

        def compute_radius(axis: int) -> int:
            scale, half = 1, self.kernel_size[axis] // 2
            radius = sum(kernel[axis] // 2 for kernel in STEM_KERNELS)
            for index in range(self.n_blocks):
                stride = pools[index][axis] if index < len(pools) else 1
                length = self.kernel_size[axis]
                # With a stride, there is less padding before the image than after it.
                radius += scale * (length - 1 - max(length - stride, 0) // 2)
                scale *= stride
                radius += scale * (self.n_conv_per_block - 1) * half
            return radius + scale * half

        return compute_radius(0), compute_radius(1), compute_radius(2)


class StarDistNetwork(nn.Module):
    """A backbone followed by two heads, which subclasses add last."""

    def add_heads(self, channels: int, settings: NetworkSettings) -> None:
        """Add the convolution before the heads, if there is one, and the heads."""
        self.features: nn.Module = nn.Identity()
        if settings.net_conv:
            convolution = make_convolution(channels, settings.net_conv, settings.kernel_size)
            self.features = nn.Sequential(convolution, ACTIVATIONS[settings.activation]())
            channels = settings.net_conv
        self.probability, self.distances = nn.Conv3d(channels, 1, 1), nn.Conv3d(channels, settings.n_rays, 1)

    def compute_scores(self, x: Tensor) -> Tensor:
        """Return the scores from the output [B, C, z, y, x] of the backbone."""
        x = self.features(x)
        return torch.cat((self.probability(x), self.distances(x)), 1)


def make_block(
    channels: Sequence[int], settings: UNetSettings, last_activation: str, *, batch_norm: bool
) -> nn.Sequential:
    """Return convolutions between these numbers of channels, each followed by an activation."""
    names, layers = [settings.activation] * (len(channels) - 2) + [last_activation], list[nn.Module]()
    for (inner, outer), name in zip(itertools.pairwise(channels), names, strict=True):
        layers.append(make_convolution(inner, outer, settings.kernel_size))
        layers += [nn.BatchNorm3d(outer, eps=BATCH_NORM_EPSILON)] if batch_norm else []
        layers.append(ACTIVATIONS[name]())
    return nn.Sequential(*layers)


class StarDistUNet(StarDistNetwork):
    """StarDist's network with a U-Net as backbone. The keyword arguments are `UNetSettings`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        settings = UNetSettings(**arguments)
        channels, num_convs, count_channels = settings.in_channels, settings.n_conv_per_depth, settings.count_channels
        self.pooling = nn.Sequential()
        for factors in list_pools(settings.grid):
            numbers = [channels, *[settings.n_filter_base] * num_convs]
            self.pooling.append(make_block(numbers, settings, settings.activation, batch_norm=False))
            self.pooling.append(nn.MaxPool3d(factors))
            channels = settings.n_filter_base

        def add_block(outer: Sequence[int], last_activation: str = settings.activation) -> nn.Sequential:
            return make_block([channels, *outer], settings, last_activation, batch_norm=settings.batch_norm)

        self.down = nn.ModuleList()
        for level in range(settings.n_depth):
            self.down.append(add_block([count_channels(level)] * num_convs))
            channels = count_channels(level)
        self.pool, self.upsample = nn.MaxPool3d(settings.pool), nn.Upsample(scale_factor=settings.pool)
        lower_channels = count_channels(settings.n_depth - 1)
        self.middle = add_block([*[count_channels(settings.n_depth)] * (num_convs - 1), lower_channels])
        self.up, channels = nn.ModuleList(), lower_channels
        for level in reversed(range(settings.n_depth)):
            channels += count_channels(level)
            numbers = [*[count_channels(level)] * (num_convs - 1), count_channels(level - 1)]
            self.up.append(add_block(numbers, settings.activation if level else settings.last_activation))
            channels = numbers[-1]
        self.add_heads(channels, settings)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores: [B, C, z, y, x] -> [B, 1 + R, z / g, y / g, x / g]."""
        x, skips = self.pooling(x), list[Tensor]()
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat((self.upsample(x), skips.pop()), 1))
        return self.compute_scores(x)


class ResidualBlock(nn.Module):
    """Residual block of `csbdeep`, with a projection if the numbers of channels or voxels change."""

    def __init__(self, in_channels: int, out_channels: int, pool: Triple, settings: ResNetSettings) -> None:
        super().__init__()
        layers, channels, has_bias = list[nn.Module](), in_channels, not settings.batch_norm
        for index in range(settings.n_conv_per_block):
            stride = (1, 1, 1) if index else pool
            layers.append(make_convolution(channels, out_channels, settings.kernel_size, stride, bias=has_bias))
            layers += [nn.BatchNorm3d(out_channels, eps=BATCH_NORM_EPSILON)] if settings.batch_norm else []
            layers += [ACTIVATIONS[settings.activation]()] if index < settings.n_conv_per_block - 1 else []
            channels = out_channels
        self.main = nn.Sequential(*layers)
        self.projection: nn.Module = nn.Identity()
        if any(factor != 1 for factor in pool) or out_channels != in_channels:
            self.projection = make_convolution(in_channels, out_channels, (1, 1, 1), pool, bias=has_bias)
        self.activation = ACTIVATIONS[settings.activation]()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, z, y, x] to [B, K, z / pool, y / pool, x / pool]."""
        output: Tensor = self.activation(self.projection(x) + self.main(x))
        return output


class StarDistResNet(StarDistNetwork):
    """StarDist's network with residual blocks as backbone. The keyword arguments are `ResNetSettings`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        settings = ResNetSettings(**arguments)
        channels, pools = settings.n_filter_base, list(list_pools(settings.grid))
        if len(pools) > settings.n_blocks:
            raise ValueError(f"the grid {settings.grid} requires at least {len(pools)} blocks, not {settings.n_blocks}")
        self.stem, self.blocks = nn.Sequential(), nn.Sequential()
        for inner, kernel_size in zip((settings.in_channels, channels), STEM_KERNELS, strict=True):
            self.stem.append(make_convolution(inner, channels, kernel_size))
        for pool in [*pools, *[(1, 1, 1)] * (settings.n_blocks - len(pools))]:
            outer = channels * 2 if any(factor > 1 for factor in pool) else channels
            self.blocks.append(ResidualBlock(channels, outer, pool, settings))
            channels = outer
        self.add_heads(channels, settings)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores: [B, C, z, y, x] -> [B, 1 + R, z / g, y / g, x / g]."""
        return self.compute_scores(self.blocks(self.stem(x)))
