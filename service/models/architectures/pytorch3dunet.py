"""The 3D U-Nets of pytorch-3dunet, which PlantSeg and PanSeg train. The names of their tensors are the same.

Source: pytorch-3dunet 1.9 by A. Wolny et al.; Çiçek et al. 2016; Lee et al. 2017 (residual blocks). The networks return
logits, because StackSeg applies the activation when it decodes the scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_LEVELS = 10
MAX_FEATURES = 2**14
INTERPOLATION_MODES = ("nearest", "trilinear", "area")
_NONLINEARITIES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "r": ("ReLU", lambda: nn.ReLU(inplace=True)),
    "l": ("LeakyReLU", lambda: nn.LeakyReLU(inplace=True)),
    "e": ("ELU", lambda: nn.ELU(inplace=True)),
}
# Dropout, which has no effect on a trained network.
_DROPOUT = "dD"
LAYERS = "cgb" + "".join(_NONLINEARITIES) + _DROPOUT


class _SingleConv(nn.Sequential):
    """A convolution with the normalization and nonlinearity that `order` specifies, one letter per layer."""

    def __init__(self, in_channels: int, out_channels: int, order: str, num_groups: int | None) -> None:
        super().__init__()
        is_before_conv = True
        for letter in order:
            channels = in_channels if is_before_conv else out_channels
            if letter == "c":
                has_bias = not set("gb") & set(order)
                self.add_module("conv", nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=has_bias))
                is_before_conv = False
            elif letter == "g":
                groups = num_groups or 1
                self.add_module("groupnorm", nn.GroupNorm(groups if channels >= groups else 1, channels))
            elif letter == "b":
                self.add_module("batchnorm", nn.BatchNorm3d(channels))
            elif letter in _NONLINEARITIES:
                name, create = _NONLINEARITIES[letter]
                self.add_module(name, create())


class _DoubleConv(nn.Sequential):
    """Two convolutions. In the encoder, the first one usually has half of the output channels."""

    def __init__(
        self, in_channels: int, out_channels: int, order: str, num_groups: int | None, *, upscale: int | None = None
    ) -> None:
        super().__init__()
        middle = out_channels
        if upscale is not None:
            middle = max(out_channels if upscale == 1 else out_channels // 2, in_channels)
        self.add_module("SingleConv1", _SingleConv(in_channels, middle, order, num_groups))
        self.add_module("SingleConv2", _SingleConv(middle, out_channels, order, num_groups))


class _ResidualBlock(nn.Module):
    """Two convolutions that are added to a linear projection of the input."""

    def __init__(self, in_channels: int, out_channels: int, order: str, num_groups: int | None) -> None:
        super().__init__()
        is_projected = in_channels != out_channels
        self.conv1 = nn.Conv3d(in_channels, out_channels, 1) if is_projected else nn.Identity()
        self.conv2 = _SingleConv(out_channels, out_channels, order, num_groups)
        linear_order = "".join(letter for letter in order if letter not in _NONLINEARITIES)
        self.conv3 = _SingleConv(out_channels, out_channels, linear_order, num_groups)
        if "l" in order:
            self.non_linearity: nn.Module = nn.LeakyReLU(negative_slope=0.1, inplace=True)
        else:
            self.non_linearity = nn.ELU(inplace=True) if "e" in order else nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features [B, out_channels, z, y, x] from features [B, in_channels, z, y, x]."""
        residual = self.conv1(x)
        features: Tensor = self.non_linearity(self.conv3(self.conv2(residual)) + residual)
        return features


class _ChannelExcitation(nn.Module):
    """Squeeze and excitation (Hu et al. 2018): scale each channel by a function of the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Scale features [B, C, z, y, x]."""
        scales = torch.sigmoid(self.fc2(torch.relu(self.fc1(x.mean((2, 3, 4))))))
        return x * scales[:, :, None, None, None]


class _SpatialExcitation(nn.Module):
    """Squeeze and excitation (Roy et al. 2018): scale each voxel by a function of its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale features [B, C, z, y, x]."""
        return x * torch.sigmoid(self.conv(x))


class _Excitation(nn.Module):
    """The maximum of channel and spatial excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cSE, self.sSE = _ChannelExcitation(channels), _SpatialExcitation(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Scale features [B, C, z, y, x]."""
        return torch.maximum(self.cSE(x), self.sSE(x))


class _ResidualExcitationBlock(_ResidualBlock):
    """A residual block followed by squeeze and excitation."""

    def __init__(self, in_channels: int, out_channels: int, order: str, num_groups: int | None) -> None:
        super().__init__(in_channels, out_channels, order, num_groups)
        self.se_module = _Excitation(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features [B, out_channels, z, y, x] from features [B, in_channels, z, y, x]."""
        features: Tensor = self.se_module(super().forward(x))
        return features


class _Encoder(nn.Module):
    """One level of the encoder: maximum pooling, except at the first level, and a block of convolutions."""

    def __init__(self, block: nn.Module, *, is_pooled: bool) -> None:
        super().__init__()
        self.pooling = nn.MaxPool3d(2) if is_pooled else nn.Identity()
        self.basic_module = block

    def forward(self, x: Tensor) -> Tensor:
        """Compute features [B, K, z / 2, y / 2, x / 2] from features [B, C, z, y, x]."""
        features: Tensor = self.basic_module(self.pooling(x))
        return features


class _Interpolation(nn.Module):
    """Upsampling by interpolation to the size of the encoder's features."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Upsample features `x` [B, C, z, y, x] to the spatial size of `skip`."""
        return functional.interpolate(x, size=skip.shape[2:], mode=self._mode)


class _UpConvolution(nn.Module):
    """A transposed convolution, which returns 2 n - 1 voxels per axis, and repetition of voxels to the full size."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv_transposed = nn.ConvTranspose3d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Upsample features [B, C, z, y, x] to [B, K, *size]."""
        return functional.interpolate(self.conv_transposed(x), size=list(size))


class _Deconvolution(nn.Module):
    """Learned upsampling to the size of the encoder's features."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.upsample = _UpConvolution(in_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Upsample features `x` [B, C, z, y, x] to the spatial size of `skip`."""
        features: Tensor = self.upsample(x, skip.shape[2:])
        return features


class _Decoder(nn.Module):
    """One level of the decoder: upsampling, concatenation or addition of the encoder's features, and a block."""

    def __init__(self, upsampling: nn.Module, block: nn.Module, *, is_concatenated: bool) -> None:
        super().__init__()
        self.upsampling, self.basic_module, self._is_concatenated = upsampling, block, is_concatenated

    def forward(self, skip: Tensor, x: Tensor) -> Tensor:
        """Combine the encoder's features `skip` [B, K, z, y, x] with the features `x` of the level below."""
        x = self.upsampling(x, skip)
        features: Tensor = self.basic_module(torch.cat((skip, x), 1) if self._is_concatenated else skip + x)
        return features


class _UNet(nn.Module):
    """A U-Net without its final activation."""

    def __init__(self, encoders: Sequence[nn.Module], decoders: Sequence[nn.Module], final_conv: nn.Module) -> None:
        super().__init__()
        self.encoders, self.decoders = nn.ModuleList(encoders), nn.ModuleList(decoders)
        self.final_conv = final_conv

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [B, out_channels, z, y, x] from an image [B, in_channels, z, y, x]."""
        skips = list[Tensor]()
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
        skips.pop()
        for decoder in self.decoders:
            x = decoder(skips.pop(), x)
        logits: Tensor = self.final_conv(x)
        return logits


@dataclass(frozen=True)
class Arguments:
    """Arguments of the original networks, without those that have no effect on a trained network.

    f_maps        number of features of each level, or of the first level if the others have 2, 4, ... times as many
    layer_order   layers of a convolution: c convolution, g group norm, b batch norm, r ReLU, l leaky ReLU, e ELU,
                  d or D dropout
    num_groups    number of groups of group norms; those with fewer channels have one group
    num_levels    number of levels if `f_maps` is a number; None for the default of the original
    conv_upscale  1: the first convolution of an encoder already has all output channels; 2: usually half of them
    upsample      default, deconv, or in UNet3D an interpolation mode; default is nearest, or deconv with added instead
                  of concatenated features in residual networks
    """

    in_channels: int
    out_channels: int
    f_maps: int | Sequence[int] = 64
    layer_order: str = "gcr"
    num_groups: int | None = 8
    num_levels: int | None = None
    conv_upscale: int = 2
    upsample: str = "default"


def _make_unet(kind: str, **arguments: Any) -> nn.Module:
    """Build a network. `arguments` are those of `Arguments`. Raises ValueError or TypeError if they are invalid."""
    values = Arguments(**arguments)
    is_residual = kind in _RESIDUAL_BLOCKS
    _check_arguments(values, is_residual=is_residual)
    features = _list_features(values.f_maps, values.num_levels or (5 if is_residual else 4))

    def make_block(inputs: int, outputs: int, upscale: int | None = None) -> nn.Module:
        if is_residual:
            return _RESIDUAL_BLOCKS[kind](inputs, outputs, values.layer_order, values.num_groups)
        return _DoubleConv(inputs, outputs, values.layer_order, values.num_groups, upscale=upscale)

    def make_decoder(upper: int, lower: int) -> nn.Module:
        if is_residual and values.upsample == "default":
            return _Decoder(_Deconvolution(lower, upper), make_block(upper, upper), is_concatenated=False)
        if values.upsample == "deconv":
            return _Decoder(_Deconvolution(lower, upper), make_block(lower, upper), is_concatenated=True)
        mode = "nearest" if values.upsample == "default" else values.upsample
        return _Decoder(_Interpolation(mode), make_block(upper + lower, upper), is_concatenated=True)

    encoders = [
        _Encoder(make_block(inputs, outputs, values.conv_upscale), is_pooled=level > 0)
        for level, (inputs, outputs) in enumerate(itertools.pairwise([values.in_channels, *features]))
    ]
    decoders = [make_decoder(upper, lower) for upper, lower in reversed(list(itertools.pairwise(features)))]
    return _UNet(encoders, decoders, nn.Conv3d(features[0], values.out_channels, 1))


_RESIDUAL_BLOCKS = {"residual": _ResidualBlock, "residual with excitation": _ResidualExcitationBlock}
CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {
    "UNet3D": partial(_make_unet, "double"),
    "ResidualUNet3D": partial(_make_unet, "residual"),
    "ResidualUNetSE3D": partial(_make_unet, "residual with excitation"),
}


def _list_features(f_maps: int | Sequence[int], num_levels: int) -> list[int]:
    """Return the number of features of each level."""
    if isinstance(f_maps, int):
        if not 2 <= num_levels <= MAX_LEVELS:
            raise ValueError(f"num_levels must be from 2 to {MAX_LEVELS}, not {num_levels!r:.20}")
        f_maps = [f_maps * 2**level for level in range(num_levels)]
    if not 2 <= len(f_maps) <= MAX_LEVELS:
        raise ValueError(f"f_maps must have from 2 to {MAX_LEVELS} levels, not {len(f_maps)}")
    if not all(isinstance(count, int) and 1 <= count <= MAX_FEATURES for count in f_maps):
        raise ValueError(f"f_maps must contain numbers from 1 to {MAX_FEATURES}")
    return list(f_maps)


def _check_layer_order(order: Any) -> None:
    if not isinstance(order, str) or order.count("c") != 1 or len(set(order)) != len(order) or set(order) - set(LAYERS):
        raise ValueError(f"layer_order must be c and others of the letters {LAYERS}, not {order!r:.20}")
    if order[0] in _NONLINEARITIES:
        raise ValueError(f"layer_order must not begin with a nonlinearity: {order!r}")


def _check_arguments(values: Arguments, *, is_residual: bool) -> None:
    upscale, upsample = values.conv_upscale, values.upsample
    _check_layer_order(values.layer_order)
    if "g" in values.layer_order and not isinstance(values.num_groups, int):
        raise ValueError(f"num_groups must be a number if layer_order contains g, not {values.num_groups!r:.20}")
    if upscale not in {1, 2}:
        raise ValueError(f"conv_upscale must be 1 or 2, not {upscale!r:.20}")
    modes = ("default", "deconv") if is_residual else ("default", "deconv", *INTERPOLATION_MODES)
    if upsample not in modes:
        raise ValueError(f"upsample must be one of {', '.join(modes)}, not {upsample!r:.20}")
