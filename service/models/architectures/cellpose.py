"""The network of Cellpose 1 to 3 (`cellpose.resnet_torch.CPnet`), applied to each plane of a window.

It is a residual U-Net with batch norm before each convolution. The mean of the features at the lowest resolution, the
style, is added to the features of all levels, so scores depend on the size of the plane. The names of the layers are
those of Cellpose's files.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from service.models.spec_parts import FrozenModel

Channels = Annotated[int, Field(ge=1, le=4096)]


class CellposeSettings(FrozenModel):
    """Arguments of the network.

    in_channels  number of channels of the network; if windows have fewer channels, the others are zero
    features     number of channels at each resolution, the highest resolution first
    kernel_size  odd edge length of the kernels
    """

    in_channels: Channels = 2
    features: Annotated[tuple[Channels, ...], Field(min_length=2, max_length=8)]
    kernel_size: Annotated[int, Field(ge=1, le=31)] = 3


def make_layer(in_channels: int, out_channels: int, kernel_size: int, *, has_activation: bool = True) -> nn.Sequential:
    """Return batch norm, ReLU if `has_activation` is set, and a convolution with padding."""
    layers: list[nn.Module] = [nn.BatchNorm2d(in_channels), *([nn.ReLU(inplace=True)] if has_activation else [])]
    return nn.Sequential(*layers, nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2))


class DownBlock(nn.Module):
    """Four convolutions with two shortcuts."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.proj = make_layer(in_channels, out_channels, 1, has_activation=False)
        channels = [in_channels, *[out_channels] * 3]
        self.conv = nn.ModuleDict(
            {f"conv_{i}": make_layer(count, out_channels, kernel_size) for i, count in enumerate(channels)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, y, x] to [N, K, y, x]."""
        x = self.proj(x) + self.conv["conv_1"](self.conv["conv_0"](x))
        output: Tensor = x + self.conv["conv_3"](self.conv["conv_2"](x))
        return output


class StyledLayer(nn.Module):
    """A layer whose input is shifted by a linear function of the style."""

    def __init__(self, channels: int, style_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = make_layer(channels, channels, kernel_size)
        self.full = nn.Linear(style_channels, channels)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Map [N, C, y, x] and the style [N, S] to [N, C, y, x]."""
        output: Tensor = self.conv(x + self.full(style)[:, :, None, None])
        return output


class UpBlock(nn.Module):
    """Four convolutions with two shortcuts, which depend on the style and on the features of the first half."""

    def __init__(self, in_channels: int, out_channels: int, style_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.proj = make_layer(in_channels, out_channels, 1, has_activation=False)
        layers = {"conv_0": make_layer(in_channels, out_channels, kernel_size)}
        styled_layers = {f"conv_{i}": StyledLayer(out_channels, style_channels, kernel_size) for i in (1, 2, 3)}
        self.conv = nn.ModuleDict({**layers, **styled_layers})

    def forward(self, x: Tensor, skip: Tensor, style: Tensor) -> Tensor:
        """Map [N, C, y, x], the features `skip` [N, K, y, x] and the style [N, S] to [N, K, y, x]."""
        x = self.proj(x) + self.conv["conv_1"](self.conv["conv_0"](x) + skip, style)
        output: Tensor = x + self.conv["conv_3"](self.conv["conv_2"](x, style), style)
        return output


class Blocks(nn.Module):
    """The blocks of one half of the network, under the name that Cellpose's files use."""

    def __init__(self, name: str, **blocks: nn.Module) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleDict(blocks))


class PlaneNetwork(nn.Module):
    """A network that scores each plane of a window separately.

    in_channels  number of channels of the network; if windows have fewer channels, the others are zero
    """

    in_channels: int

    def forward(self, x: Tensor) -> Tensor:
        """Compute the scores of planes: [B, C, z, y, x] -> [B, 4, z, y, x].

        The outputs are the logit of the foreground probability, and the flow along z, y and x, times 5. The flow along
        z is 0.
        """
        batch_size, channels, depth, height, width = x.shape
        planes = x.transpose(1, 2).reshape(batch_size * depth, channels, height, width)
        if channels > self.in_channels:
            raise ValueError(f"the network has {self.in_channels} channels, but the window has {channels}")
        if channels < self.in_channels:
            planes = functional.pad(planes, (0, 0, 0, 0, 0, self.in_channels - channels))
        scores = self.score_planes(planes).reshape(batch_size, depth, 3, height, width).transpose(1, 2)
        # The logit is the last output of the network.
        return torch.cat((scores[:, 2:], torch.zeros_like(scores[:, :1]), scores[:, :2]), 1)

    def score_planes(self, x: Tensor) -> Tensor:
        """Compute the flow along y and x and the logit of planes: [N, C, y, x] -> [N, 3, y, x]."""
        raise NotImplementedError


class CellposeNet(PlaneNetwork):
    """Cellpose's network for planes. The keyword arguments are `CellposeSettings`.

    The edge lengths of a plane must be multiples of 2 to the power of the number of levels below the first.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        settings = CellposeSettings(**arguments)
        if settings.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, not {settings.kernel_size}")
        self.in_channels, kernel_size, features = settings.in_channels, settings.kernel_size, settings.features
        pairs = itertools.pairwise((settings.in_channels, *features))
        down = {f"res_down_{i}": DownBlock(*pair, kernel_size) for i, pair in enumerate(pairs)}
        pairs = itertools.pairwise((*features, features[-1]))
        up = {
            f"res_up_{i}": UpBlock(lower, higher, features[-1], kernel_size) for i, (higher, lower) in enumerate(pairs)
        }
        self.downsample, self.upsample = Blocks("down", **down), Blocks("up", **up)
        self.output = make_layer(features[0], 3, 1)

    def score_planes(self, x: Tensor) -> Tensor:
        """Compute the flow along y and x and the logit of planes: [N, C, y, x] -> [N, 3, y, x]."""
        skips = list[Tensor]()
        for block in self.downsample.get_submodule("down").children():
            x = block(functional.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        style = x.mean((2, 3))
        style = style / style.square().sum(1, keepdim=True).sqrt()
        for index, block in enumerate(reversed([*self.upsample.get_submodule("up").children()])):
            x = block(functional.interpolate(x, scale_factor=2.0) if index else x, skips.pop(), style)
        scores: Tensor = self.output(x)
        return scores
