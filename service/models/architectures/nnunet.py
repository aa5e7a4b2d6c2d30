"""The networks of nnU-Net v2: `PlainConvUNet` and `ResidualEncoderUNet`, for inference on 3D images.

Source: Isensee et al. 2021 and 2024, and version 0.4 of the package `dynamic_network_architectures`. The tensors have
the same names as there, without the package's second name for each tensor. The heads for deep supervision, which only
training needs, are left out.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NORMS: dict[str, Callable[..., nn.Module]] = {"InstanceNorm3d": nn.InstanceNorm3d, "BatchNorm3d": nn.BatchNorm3d}
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {"LeakyReLU": nn.LeakyReLU, "ReLU": nn.ReLU}
Triple = tuple[int, int, int]
NO_STRIDE = (1, 1, 1)
# Maximum number of blocks of a level. nnU-Net's presets have up to 6.
MAX_BLOCKS = 256
MAX_FOLDS = 100


class Layers(NamedTuple):
    """The kinds of layers of a network, with their keyword arguments. `norm` and `activation` are names in torch."""

    conv_bias: bool = True
    norm: str = "InstanceNorm3d"
    norm_arguments: Mapping[str, Any] = {"eps": 1e-5, "affine": True}
    activation: str = "LeakyReLU"
    activation_arguments: Mapping[str, Any] = {}

    def make_activation(self) -> nn.Module:
        """Return the activation. It works in place, as the blocks do not use its input again."""
        return ACTIVATIONS[self.activation](**{**self.activation_arguments, "inplace": True})

    def make_block(
        self, channels: tuple[int, int], kernel_size: Triple, stride: Triple = NO_STRIDE, *, is_active: bool = True
    ) -> nn.Sequential:
        """Return a convolution from `channels[0]` to `channels[1]`, its norm and, if `is_active`, its activation."""
        z, y, x = ((length - 1) // 2 for length in kernel_size)
        layers: dict[str, nn.Module] = {
            "conv": nn.Conv3d(*channels, kernel_size, stride, (z, y, x), bias=self.conv_bias),
            "norm": NORMS[self.norm](channels[1], **self.norm_arguments),
        }
        if is_active:
            layers["nonlin"] = self.make_activation()
        return nn.Sequential(OrderedDict(layers))

    def make_stack(self, channels: Sequence[int], kernel_size: Triple, stride: Triple = NO_STRIDE) -> nn.Sequential:
        """Return a stack of blocks. `channels` begins with the number of input channels; the first block is strided."""
        blocks = [
            self.make_block(pair, kernel_size, NO_STRIDE if index else stride)
            for index, pair in enumerate(itertools.pairwise(channels))
        ]
        return nn.Sequential(OrderedDict(convs=nn.Sequential(*blocks)))


class Shape(NamedTuple):
    """The sizes of a network, from the finest to the coarsest level.

    features       number of channels of each level
    kernel_sizes   kernel size (z, y, x) of each level
    strides        stride (z, y, x) with which each level is computed from the one before; the first from the image
    num_blocks     number of convolutions, or of residual blocks, of each level of the encoder
    num_convs      number of convolutions of each level of the decoder, from the coarsest to the finest
    """

    in_channels: int
    out_channels: int
    features: Sequence[int]
    kernel_sizes: Sequence[Triple]
    strides: Sequence[Triple]
    num_blocks: Sequence[int]
    num_convs: Sequence[int]


class _BlockMean(nn.Module):
    """Mean of each block of voxels. `AvgPool3d` does not support bfloat16 on a CPU."""

    def __init__(self, block: Triple) -> None:
        super().__init__()
        self._block = block

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, C, z / bz, y / by, x / bx] from [B, C, z, y, x]."""
        (z, y, w), (bz, by, bx) = x.shape[2:], self._block
        return x.reshape(*x.shape[:2], z // bz, bz, y // by, by, w // bx, bx).mean((3, 5, 7))


class _ResidualBlock(nn.Module):
    """The block of ResNet-D (He et al. 2019): the shortcut averages before it projects."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Triple, stride: Triple, layers: Layers
    ) -> None:
        super().__init__()
        self.conv1 = layers.make_block((in_channels, out_channels), kernel_size, stride)
        self.conv2 = layers.make_block((out_channels, out_channels), kernel_size, is_active=False)
        self.nonlin2 = layers.make_activation()
        shortcut: list[nn.Module] = [_BlockMean(stride)] if max(stride) > 1 else []
        if in_channels != out_channels:
            projection = layers._replace(conv_bias=False)
            shortcut.append(projection.make_block((in_channels, out_channels), (1, 1, 1), is_active=False))
        self.skip = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features [B, C, z, y, x]."""
        features: Tensor = self.nonlin2(self.conv2(self.conv1(x)).add_(self.skip(x)))
        return features


class _Encoder(nn.Module):
    """Encoder that returns the features of all levels. `stem` is None in a network without residual blocks."""

    def __init__(self, stem: nn.Module | None, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the features of each level, the finest first."""
        if self.stem is not None:
            x = self.stem(x)
        features = list[Tensor]()
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class _Decoder(nn.Module):
    """Decoder that upsamples the coarsest features level by level, next to the features of the encoder."""

    def __init__(self, shape: Shape, layers: Layers) -> None:
        super().__init__()
        levels = list(zip(shape.features, shape.kernel_sizes, shape.strides[1:], strict=False))[::-1]
        below = shape.features[:0:-1]
        self.transpconvs = nn.ModuleList(
            nn.ConvTranspose3d(coarse, fine, stride, stride, bias=layers.conv_bias)
            for coarse, (fine, _, stride) in zip(below, levels, strict=True)
        )
        self.stages = nn.ModuleList(
            layers.make_stack([2 * fine, *[fine] * num_convs], kernel_size)
            for num_convs, (fine, kernel_size, _) in zip(shape.num_convs, levels, strict=True)
        )
        self._head_name = str(len(levels) - 1)
        self.seg_layers = nn.ModuleDict({self._head_name: nn.Conv3d(shape.features[0], shape.out_channels, 1)})

    def forward(self, features: list[Tensor]) -> Tensor:
        """Compute scores [B, K, z, y, x] from the features of all levels, the finest first."""
        x = features.pop()
        for upsample, stage in zip(self.transpconvs, self.stages, strict=True):
            x = stage(torch.cat((upsample(x), features.pop()), 1))
        scores: Tensor = self.seg_layers[self._head_name](x)
        return scores


class _UNet(nn.Module):
    """A U-Net that consists of an encoder and a decoder."""

    def __init__(self, encoder: _Encoder, decoder: _Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores [B, out_channels, z, y, x] from an image [B, in_channels, z, y, x]."""
        scores: Tensor = self.decoder(self.encoder(x))
        return scores


class _Ensemble(nn.Module):
    """The mean of the scores of networks that were trained on different folds of the training data."""

    def __init__(self, folds: Sequence[nn.Module]) -> None:
        super().__init__()
        self.folds = nn.ModuleList(folds)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores [B, out_channels, z, y, x] from an image [B, in_channels, z, y, x]."""
        first, *others = self.folds
        scores: Tensor = first(x)
        for network in others:
            scores = scores + network(x)
        return scores / len(self.folds)


def _make_plain_network(shape: Shape, layers: Layers) -> nn.Module:
    channels_before = (shape.in_channels, *shape.features)
    stages = [
        nn.Sequential(layers.make_stack([before, *[after] * num_convs], kernel_size, stride))
        for before, after, kernel_size, stride, num_convs in zip(
            channels_before, shape.features, shape.kernel_sizes, shape.strides, shape.num_blocks, strict=False
        )
    ]
    return _UNet(_Encoder(None, stages), _Decoder(shape, layers))


def _make_residual_network(shape: Shape, layers: Layers) -> nn.Module:
    stem = layers.make_stack([shape.in_channels, shape.features[0]], shape.kernel_sizes[0])
    channels_before = (shape.features[0], *shape.features)
    stages = []
    for before, after, kernel_size, stride, num_blocks in zip(
        channels_before, shape.features, shape.kernel_sizes, shape.strides, shape.num_blocks, strict=False
    ):
        first = _ResidualBlock(before, after, kernel_size, stride, layers)
        others = [_ResidualBlock(after, after, kernel_size, NO_STRIDE, layers) for _ in range(num_blocks - 1)]
        stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(first, *others))))
    return _UNet(_Encoder(stem, stages), _Decoder(shape, layers))


def _check_shape(shape: Shape) -> None:
    """Raise ValueError if the numbers of levels differ, or if there are no levels or blocks."""
    num_levels = len(shape.features)
    lengths = (len(shape.kernel_sizes), len(shape.strides), len(shape.num_blocks), len(shape.num_convs) + 1)
    if num_levels < 2 or any(length != num_levels for length in lengths):
        raise ValueError("kernel_sizes, strides, num_blocks and num_convs must describe the levels in `features`")
    numbers = (*shape.features, *shape.num_blocks, *shape.num_convs)
    if min(*numbers, *itertools.chain(*shape.kernel_sizes, *shape.strides)) < 1:
        raise ValueError("all sizes must be positive")
    if max(*shape.num_blocks, *shape.num_convs) > MAX_BLOCKS:
        raise ValueError(f"a level has more than {MAX_BLOCKS} blocks")


def _make_triples(sizes: Sequence[Sequence[int]]) -> tuple[Triple, ...]:
    return tuple((z, y, x) for z, y, x in sizes)


def _make_constructor(make_network: Callable[[Shape, Layers], nn.Module]) -> Callable[..., nn.Module]:
    def construct(*, num_folds: int = 1, **arguments: Any) -> nn.Module:
        if missing_names := [name for name in Shape._fields if name not in arguments]:
            raise ValueError(f"these arguments are missing: {', '.join(missing_names)}")
        shape = Shape(**{name: arguments.pop(name) for name in Shape._fields})
        shape = shape._replace(kernel_sizes=_make_triples(shape.kernel_sizes), strides=_make_triples(shape.strides))
        _check_shape(shape)
        layers = Layers(**arguments)
        if num_folds > MAX_FOLDS:
            raise ValueError(f"num_folds exceeds {MAX_FOLDS}")
        if num_folds == 1:
            return make_network(shape, layers)
        return _Ensemble([make_network(shape, layers) for _ in range(num_folds)])

    return construct


CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {
    "PlainConvUNet": _make_constructor(_make_plain_network),
    "ResidualEncoderUNet": _make_constructor(_make_residual_network),
}
