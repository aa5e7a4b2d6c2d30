"""Convolutions with weights packed for oneDNN's kernels, fused with the activation that follows them.

This gives most of the speedup of a frozen compiled graph on a CPU, without the time for compilation at every start.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu import pixel_shuffle, strided_conv, winograd
from service.engine.cpu.strided_conv import Layer
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

# oneDNN's fused ReLU turns NaN into 0, which would hide non-finite scores. A leaky ReLU with a slope of 2**-100
# propagates NaN, and its negative values are so small that they vanish in any sum with nonzero terms.
TINY_SLOPE = 2.0**-100


class Activation(NamedTuple):
    """The name and parameters of an activation in oneDNN."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


class PackedConvolution(nn.Module):
    """A float32 or bfloat16 convolution on the CPU, fused with an activation, with channels-last input and output.

    Sums and the activation are computed in float32 and rounded to the layer's dtype once.

    Weights are packed for the shape of the first input. Inputs of other shapes give correct results but take longer.
    """

    def __init__(self, layer: Layer, activation: Activation) -> None:
        super().__init__()
        # Retained until the first input, whose shape is needed to pack the weights.
        self._unpacked_weight: Tensor | None = layer.weight
        # Not registered as a buffer, because a tensor in a oneDNN layout can be neither moved nor copied.
        self._weight = torch.empty(0)
        self.bias, self.activation = layer.bias, activation
        # Geometry arguments of the operators: padding, output padding if transposed, stride, dilation, groups.
        common_arguments = (list(layer.stride), list(layer.dilation), layer.groups)
        padding_arguments = [list(_read_padding(layer))]
        if is_transposed := isinstance(layer, nn.ConvTranspose3d):
            padding_arguments.append(list(layer.output_padding))
        self.geometry = (*padding_arguments, *common_arguments)
        operators = torch.ops.mkldnn
        self._pack = (
            operators._reorder_convolution_transpose_weight if is_transposed else operators._reorder_convolution_weight
        )
        self._run = operators._convolution_transpose_pointwise if is_transposed else operators._convolution_pointwise

    def forward(self, x: Tensor) -> Tensor:
        """Apply convolution and activation: [B, C, z, y, x] -> [B, K, z, y, x]."""
        x = _to_channels_last(x)
        if self._unpacked_weight is not None:
            self._weight = self._pack(self._unpacked_weight, *self.geometry, list(x.shape))
            self._unpacked_weight = None
        name, scalars, algorithm = self.activation
        y: Tensor = self._run(x, self._weight, self.bias, *self.geometry, name, list(scalars), algorithm)
        return y


def pack_convolutions(module: nn.Module, *, returns_scores: bool = False) -> nn.Module:
    """Replace, in place, every convolution in `module` with a packed one. Return `module`.

    Convolutions with equal kernel size and stride, and pixel shuffles, are replaced with StackSeg's kernels.

    returns_scores  whether the outputs are scores. If so, a ReLU whose zeros may appear in the scores is not fused,
                    because the class with the highest score must not change where several scores are zero.

    Raises OSError if the kernels are missing.
    """
    exact_layers = _find_exact_layers(module) if returns_scores else set[nn.Module]()
    fused_network = fuse_pairs(
        module, lambda layer, next_module: _fuse_activation(layer, next_module, must_be_exact=layer in exact_layers)
    )
    return replace_modules(fused_network, _make_replacement)


def _fuse_activation(layer: nn.Module, next_module: nn.Module, *, must_be_exact: bool) -> nn.Module | None:
    """Return the layer fused with the activation after it, or None if that is not possible or not exact enough."""
    slope = read_slope(next_module)
    if strided_conv.is_replaceable(layer) and slope is not None:
        return strided_conv.StridedConvolution(layer, slope)
    if not _is_packable(layer) or (must_be_exact and slope == 0):
        return None
    activation = _make_activation(next_module)
    return None if activation is None else PackedConvolution(layer, activation)


def _make_replacement(module: nn.Module) -> nn.Module | None:
    if strided_conv.is_replaceable(module):
        return strided_conv.StridedConvolution(module)
    return PackedConvolution(module, Activation()) if _is_packable(module) else pixel_shuffle.make_replacement(module)


def _find_exact_layers(network: nn.Module) -> set[nn.Module]:
    """Return the convolutions whose zeros may appear as scores: the last one, or all if the last one has no bias."""
    layers = [module for module in network.modules() if isinstance(module, Layer | winograd.WinogradConvolution)]
    return set(layers[-1:] if layers and layers[-1].bias is not None else layers)


def _is_packable(module: nn.Module) -> TypeGuard[Layer]:
    if not (is_plain(module, nn.Conv3d) or is_plain(module, nn.ConvTranspose3d)) or module.padding_mode != "zeros":
        return False
    if module.weight.device.type != "cpu" or not _is_supported(module.weight.dtype):
        return False
    if isinstance(module, nn.ConvTranspose3d):
        return module.groups == 1
    # For even kernel sizes, `same` pads more on one side, which oneDNN's operators do not support.
    return module.padding != "same" or all(size % 2 for size in module.kernel_size)


def _read_padding(layer: Layer) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return (0, 0, 0)
        return tuple(step * (size - 1) // 2 for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return tuple(layer.padding)


def _is_supported(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        # Unlike torch's own convolutions, the packed operators need BF16 support in the processor.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _make_activation(module: nn.Module) -> Activation | None:
    """Return the equivalent activation in oneDNN, or None if no equivalent propagates NaN."""
    slope = read_slope(module)
    if slope is not None:
        return Activation("leaky_relu", (slope or TINY_SLOPE,))
    if is_plain(module, nn.SiLU):
        return Activation("swish")
    return Activation("gelu", algorithm=module.approximate) if is_plain(module, nn.GELU) else None


def _to_channels_last(x: Tensor) -> Tensor:
    """Return `x` in channels last, with channels-last strides even for a single channel."""
    x = x.contiguous(memory_format=torch.channels_last_3d)
    if x.shape[1] > 1:
        return x
    depth, height, width = x.shape[2:]
    return x.as_strided(x.shape, (depth * height * width, 1, height * width, width, 1))
