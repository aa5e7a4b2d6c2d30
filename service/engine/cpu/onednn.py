"""Convolutions with weights in the layout of oneDNN's kernels, fused with the activation behind them.

That is most of what freezing does for a compiled graph on a CPU, without the seconds that each start compiles.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu import pixel_shuffle, strided_conv, winograd
from service.engine.cpu.strided_conv import Layer
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

# oneDNN's fused ReLU turns NaN into 0 and would hide non-finite scores. A leaky slope of 2**-100 propagates NaN, and
# negative values become so small that they change no sum with anything but zeros.
TINY_SLOPE = 2.0**-100


class Activation(NamedTuple):
    """An activation by its name in oneDNN."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


class PackedConvolution(nn.Module):
    """A float32 or bfloat16 `layer` on the CPU, fused with an activation; channels last in and out.

    Sums and the activation are float32, and rounded to the layer's dtype once.

    Weights are laid out for the shape of the first input. Inputs of other shapes are right as well, if slower.
    """

    def __init__(self, layer: Layer, activation: Activation) -> None:
        super().__init__()
        # Kept until the first input tells the shape to pack the weights for.
        self._unpacked: Tensor | None = layer.weight
        # Not a buffer: a tensor in a layout of oneDNN's can neither be moved nor copied.
        self._weight = torch.empty(0)
        self.bias, self.activation = layer.bias, activation
        # Arguments of the operators besides tensors: padding, output padding if transposed, stride, dilation, groups.
        shared = (list(layer.stride), list(layer.dilation), layer.groups)
        padding = [list(_padding(layer))]
        if transposed := isinstance(layer, nn.ConvTranspose3d):
            padding.append(list(layer.output_padding))
        self.geometry = (*padding, *shared)
        operators = torch.ops.mkldnn
        self._pack = (
            operators._reorder_convolution_transpose_weight if transposed else operators._reorder_convolution_weight
        )
        self._run = operators._convolution_transpose_pointwise if transposed else operators._convolution_pointwise

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x]."""
        x = _channels_last(x)
        if self._unpacked is not None:
            self._weight = self._pack(self._unpacked, *self.geometry, list(x.shape))
            self._unpacked = None
        name, scalars, algorithm = self.activation
        y: Tensor = self._run(x, self._weight, self.bias, *self.geometry, name, list(scalars), algorithm)
        return y


def pack(module: nn.Module, *, gives_scores: bool = False) -> nn.Module:
    """Replace every convolution within `module` by a packed one, in place, and return `module`.

    Convolutions whose kernel is as large as their stride, and pixel shuffles, become kernels of ours.

    gives_scores  whether the outputs are scores: a ReLU whose zeros may be among these is then left as it is, since the
                  class with the highest score must not change where several are zero

    Raises OSError where kernels cannot be compiled.
    """
    exact = _find_exact_layers(module) if gives_scores else set[nn.Module]()
    fused = fuse_pairs(module, lambda layer, following: _with_activation(layer, following, exact=layer in exact))
    return replace_modules(fused, _replacement)


def _with_activation(layer: nn.Module, following: nn.Module, *, exact: bool) -> nn.Module | None:
    """Return a layer fused with the activation, None where there is none, or none that is exact enough."""
    negative = read_slope(following)
    if strided_conv.is_replaceable(layer) and negative is not None:
        return strided_conv.StridedConvolution(layer, negative)
    if not _is_packable(layer) or (exact and negative == 0):
        return None
    activation = _activation(following)
    return None if activation is None else PackedConvolution(layer, activation)


def _replacement(module: nn.Module) -> nn.Module | None:
    if strided_conv.is_replaceable(module):
        return strided_conv.StridedConvolution(module)
    return PackedConvolution(module, Activation()) if _is_packable(module) else pixel_shuffle.make_replacement(module)


def _find_exact_layers(network: nn.Module) -> set[nn.Module]:
    """Return convolutions whose zeros may be scores: the last one, or all where that one has no bias."""
    layers = [each for each in network.modules() if isinstance(each, Layer | winograd.WinogradConvolution)]
    return set(layers[-1:] if layers and layers[-1].bias is not None else layers)


def _is_packable(module: nn.Module) -> TypeGuard[Layer]:
    if not (is_plain(module, nn.Conv3d) or is_plain(module, nn.ConvTranspose3d)) or module.padding_mode != "zeros":
        return False
    if module.weight.device.type != "cpu" or not _is_supported(module.weight.dtype):
        return False
    if isinstance(module, nn.ConvTranspose3d):
        return module.groups == 1
    # `same` pads even kernels more on one side, which oneDNN's operators do not support.
    return module.padding != "same" or all(edge % 2 for edge in module.kernel_size)


def _padding(layer: Layer) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return (0, 0, 0)
        return tuple(step * (edge - 1) // 2 for edge, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return tuple(layer.padding)


def _is_supported(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        # The packed operators refuse BF16 on other processors, unlike torch's own convolutions.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _activation(module: nn.Module) -> Activation | None:
    """Return the equivalent in oneDNN, None where there is none that propagates NaN."""
    negative = read_slope(module)
    if negative is not None:
        return Activation("leaky_relu", (negative or TINY_SLOPE,))
    if is_plain(module, nn.SiLU):
        return Activation("swish")
    return Activation("gelu", algorithm=module.approximate) if is_plain(module, nn.GELU) else None


def _channels_last(x: Tensor) -> Tensor:
    """Return `x` in channels last, with strides that say so even where there is one channel."""
    x = x.contiguous(memory_format=torch.channels_last_3d)
    if x.shape[1] > 1:
        return x
    depth, height, width = x.shape[2:]
    return x.as_strided(x.shape, (depth * height * width, 1, height * width, width, 1))
