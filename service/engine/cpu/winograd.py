"""3x3x3 convolutions on CPUs with an eighth of the usual multiplications, for images in float32 or bfloat16.

The algorithm is Winograd's F(4x4x4, 3x3x3) (Lavin and Gray 2016), described in `winograd.cpp`. It always computes in
float32; bfloat16 is only a storage format. Its rounding errors are several times those of a direct convolution, about
1e-5 relative to the scale of the scores.
"""

from __future__ import annotations

import copy
from typing import TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import SUPPORTED_DTYPES, KernelCall, Kernels
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

KERNELS = Kernels(["stackseg_convolve"], [("stackseg_columns", "q", "q"), ("stackseg_blocking", "qqqq", "q")])

# The kernel reads input channels in vectors of 8, and writes output channels in vectors of up to 16.
INPUT_CHANNEL_MULTIPLE = 8
OUTPUT_CHANNEL_MULTIPLE = 16

# Approximate number of 4x4x4 output tiles processed together. More tiles would not fit in a core's second-level cache.
TILES_PER_BLOCK = 16
# Number of points at which a tile is sampled: six along each axis.
SAMPLING_POINT_COUNT = 216

_SQRT_2 = 2**0.5
# Matrix G of F(4, 3): maps three weights to values at the points 0, sqrt(2), -sqrt(2), sqrt(1/2), -sqrt(1/2), infinity.
WEIGHT_TRANSFORM = (
    (1.0, 0.0, 0.0),
    (1 / 6, _SQRT_2 / 6, 1 / 3),
    (1 / 6, -_SQRT_2 / 6, 1 / 3),
    (-2 / 3, -_SQRT_2 / 3, -1 / 3),
    (-2 / 3, _SQRT_2 / 3, -1 / 3),
    (0.0, 0.0, 1.0),
)


class WinogradConvolution(nn.Module):
    """A 3x3x3 `nn.Conv3d` on the CPU, computed by Winograd's algorithm. Images are float32 or bfloat16.

    slope  negative slope of the fused activation: 0 for a ReLU, 1 for no activation

    Raises OSError if the kernels are missing.
    """

    weights: Tensor
    bias: Tensor | None

    def __init__(self, convolution: nn.Conv3d, slope: float = 1.0) -> None:
        super().__init__()
        self.out_channels, self.slope = convolution.out_channels, slope
        self.register_buffer("weights", pack_weights(convolution.weight.detach()))
        bias = convolution.bias
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """Apply convolution and activation: [B, C, z, y, x] -> [B, K, z, y, x], channels last."""
        # torch.compile does not trace into a custom operator. Calling one imports torch's compiler, which takes
        # several seconds, so the operator is used only while compiling.
        run = torch.ops.stackseg.convolve if torch.compiler.is_compiling() else convolve
        y: Tensor = run(x, self.weights, self.bias, self.out_channels, self.slope)
        return y


def replace_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with a `WinogradConvolution` for every convolution for which `is_replaceable` is true.

    A ReLU, a LeakyReLU, or a PReLU with one slope is fused with the convolution that it follows in an `nn.Sequential`.

    Raises OSError if the kernels are missing.
    """
    # Only an `nn.Sequential` defines which module follows the convolution.
    fused_network = fuse_pairs(copy.deepcopy(module), _fuse_activation)
    return replace_modules(fused_network, lambda child: WinogradConvolution(child) if is_replaceable(child) else None)


def _fuse_activation(layer: nn.Module, activation: nn.Module) -> WinogradConvolution | None:
    slope = read_slope(activation)
    return WinogradConvolution(layer, slope) if is_replaceable(layer) and slope is not None else None


def count_replaceable(module: nn.Module) -> int:
    """Return the number of convolutions in `module` that can be replaced."""
    return sum(is_replaceable(child) for child in module.modules())


def is_replaceable(module: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Return whether `WinogradConvolution` can replace this module."""
    return (
        is_plain(module, nn.Conv3d)
        and module.weight.dtype in SUPPORTED_DTYPES
        and module.weight.device.type == "cpu"
        and module.kernel_size == (3, 3, 3)
        and module.stride == module.dilation == (1, 1, 1)
        and module.padding in {(1, 1, 1), "same"}
        and module.padding_mode == "zeros"
        and module.groups == 1
        and module.in_channels % INPUT_CHANNEL_MULTIPLE == 0
        and module.out_channels % OUTPUT_CHANNEL_MULTIPLE == 0
    )


def pack_weights(weight: Tensor) -> Tensor:
    """Transform weights [K, C, 3, 3, 3] to the sampling points: float32 [216 C K], in the order of the kernel.

    The result is a sequence of blocks of columns (output channels), each with shape [216, C, columns].
    """
    transform = torch.tensor(WEIGHT_TRANSFORM, dtype=torch.float64)
    out_channels, in_channels = weight.shape[:2]
    sampled_weights = torch.einsum("iz,jy,lx,kczyx->ijlck", transform, transform, transform, weight.double()).float()
    sampled_weights = sampled_weights.reshape(SAMPLING_POINT_COUNT, in_channels, out_channels)
    KERNELS.require()
    widths = KERNELS.split_columns("stackseg_columns", out_channels)
    return torch.cat([block.reshape(-1) for block in torch.split(sampled_weights, widths, dim=2)])


def convolve(x: Tensor, weights: Tensor, bias: Tensor | None, out_channels: int, slope: float) -> Tensor:
    """Convolve `x` [B, C, z, y, x] in float32 or bfloat16, with weights from `pack_weights` and a float32 bias [K].

    Raises TypeError for other dtypes, RuntimeError if the channels do not match the weights, and MemoryError.
    """
    if x.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"Winograd convolutions do not support {x.dtype}")
    if x.dim() != 5 or SAMPLING_POINT_COUNT * x.shape[1] * out_channels != weights.numel():
        raise RuntimeError(f"the channels of an input of shape {list(x.shape)} do not match the weights")
    x = x.contiguous(memory_format=torch.channels_last_3d)
    y = _allocate_output(x, out_channels)
    batch, channels, depth, height, width = x.shape
    sizes = (batch, depth, height, width, channels, out_channels, TILES_PER_BLOCK, x.dtype == torch.bfloat16)
    KernelCall(KERNELS, "stackseg_convolve", (x, weights, bias), y, sizes, (slope,)).run()
    return y


# By default, inductor converts the inputs of an operator to the layout of eager mode, which is not channels last for a
# single window. The tag allows any layout.
_operator = torch.library.custom_op("stackseg::convolve", mutates_args=(), tags=(torch.Tag.flexible_layout,))(convolve)


@_operator.register_fake
def _(x: Tensor, _weights: Tensor, _bias: Tensor | None, out_channels: int, _slope: float) -> Tensor:
    return _allocate_output(x, out_channels)


def _allocate_output(x: Tensor, out_channels: int) -> Tensor:
    shape = (x.shape[0], out_channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
