"""Convolutions with their weights in the layout of oneDNN's kernels, and with the activation behind them taken in.

That is most of what freezing does for a compiled graph on a CPU, without the seconds that each start compiles.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu import pixel_shuffle, strided_conv, winograd
from service.engine.fusion import neighbours, ordinary, replace, slope

Layer = nn.Conv3d | nn.ConvTranspose3d

# A rectifier's slope for oneDNN. Without one it makes zero of NaN, which then nobody finds; with this one it makes of
# what is negative something that no sum with anything but zeros differs by.
ALMOST_ZERO = 2.0**-100


class Activation(NamedTuple):
    """What oneDNN applies to a convolution's result, by its name for it."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


class Convolution(nn.Module):
    """What a float32 or bfloat16 `layer` on the CPU computes, with an activation behind it; channels last in and out.

    Sums and the activation are float32, and rounded to the layer's dtype once.

    Weights are laid out for the shape of the first input. Inputs of other shapes are right as well, if slower.
    """

    def __init__(self, layer: Layer, activation: Activation) -> None:
        super().__init__()
        # Until its weights are laid out, for an input of the shape to come.
        self._unpacked: Tensor | None = layer.weight
        # Not a buffer: what is in a layout of oneDNN's can neither be moved nor copied.
        self._weight = torch.empty(0)
        self.bias, self.activation = layer.bias, activation
        # All that the kernels are told besides tensors: padding, of the output as well where transposed, and so on.
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
    """Replace every convolution within `module` that `Convolution` can stand for, in place; gives `module`.

    Those whose kernel is as large as their stride, and what folds voxels into channels, become kernels of ours.

    gives_scores  whether the outputs are scores: a ReLU whose zeros may be among these is then left as it is, since the
                  class with the highest score must not change where several are zero

    Raises OSError where kernels cannot be compiled.
    """
    exact = _exact(module) if gives_scores else set[nn.Module]()
    for step, following in neighbours(module):
        layer = _with_activation(step.module, following.module, exact=step.module in exact)
        if layer is not None:
            step.put(layer)
            following.put(nn.Identity())
    return replace(module, _replacement)


def _with_activation(layer: nn.Module, following: nn.Module, *, exact: bool) -> nn.Module | None:
    """What computes both, None where nothing does, or not as exactly as it must be."""
    negative = slope(following)
    if strided_conv.suits(layer) and negative is not None:
        return strided_conv.Convolution(layer, negative)
    if not _suits(layer) or (exact and negative == 0):
        return None
    activation = _activation(following)
    return None if activation is None else Convolution(layer, activation)


def _replacement(module: nn.Module) -> nn.Module | None:
    if strided_conv.suits(module):
        return strided_conv.Convolution(module)
    return Convolution(module, Activation()) if _suits(module) else pixel_shuffle.replacement(module)


def _exact(network: nn.Module) -> set[nn.Module]:
    """Convolutions whose zeros may be among the scores: the last one, or all where that has no bias to add to them."""
    layers = [each for each in network.modules() if isinstance(each, Layer | winograd.Convolution)]
    return set(layers[-1:] if layers and layers[-1].bias is not None else layers)


def _suits(module: nn.Module) -> TypeGuard[Layer]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not (ordinary(module, nn.Conv3d) or ordinary(module, nn.ConvTranspose3d)) or module.padding_mode != "zeros":
        return False
    computes = module.weight.device.type == "cpu" and _computes(module.weight.dtype)
    if isinstance(module, nn.ConvTranspose3d):
        return computes and module.groups == 1
    # Even kernels are padded more on one side, which these kernels cannot.
    return computes and (module.padding != "same" or all(edge % 2 for edge in module.kernel_size))


def _padding(layer: Layer) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return (0, 0, 0)
        return tuple(step * (edge - 1) // 2 for edge, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return tuple(layer.padding)


def _computes(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        # Elsewhere the operators refuse it, which torch's own convolutions do not.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _activation(module: nn.Module) -> Activation | None:
    """What oneDNN has for it, None where that would lose NaN or is something else."""
    negative = slope(module)
    if negative is not None:
        return Activation("leaky_relu", (negative or ALMOST_ZERO,))
    if ordinary(module, nn.SiLU):
        return Activation("swish")
    return Activation("gelu", algorithm=module.approximate) if ordinary(module, nn.GELU) else None


def _channels_last(x: Tensor) -> Tensor:
    """The same values in that order, and in strides that say so even where there is one channel."""
    x = x.contiguous(memory_format=torch.channels_last_3d)
    if x.shape[1] > 1:
        return x
    depth, height, width = x.shape[2:]
    return x.as_strided(x.shape, (depth * height * width, 1, height * width, width, 1))
