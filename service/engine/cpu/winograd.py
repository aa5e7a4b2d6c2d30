"""3x3x3 convolutions with an eighth of the multiplications, for CPUs; activations in float32 or bfloat16.

The algorithm is Winograd's F(4x4x4, 3x3x3) (Lavin and Gray 2016); `winograd.cpp` says how. It computes in float32, with
rounding errors several times those of a direct convolution, some 1e-5 of the scores' scale: bfloat16 is only stored.
"""

from __future__ import annotations

import copy
from typing import TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import DTYPES, KernelCall, Kernels
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

KERNELS = Kernels(["stackseg_convolve"], [("stackseg_columns", "q", "q"), ("stackseg_blocking", "qqqq", "q")])

# The kernel takes channels in vectors of eight, and makes them in vectors of sixteen at most.
INPUTS, OUTPUTS = 8, 16

# About as many tiles of 4x4x4 outputs are worked on together; more leave a core's second-level cache.
TILES = 16
POINTS = 216

_ROOT = 2**0.5
# G of F(4, 3): three weights -> their values at the points 0, sqrt(2), -sqrt(2), sqrt(1/2), -sqrt(1/2), infinity.
SAMPLING = (
    (1.0, 0.0, 0.0),
    (1 / 6, _ROOT / 6, 1 / 3),
    (1 / 6, -_ROOT / 6, 1 / 3),
    (-2 / 3, -_ROOT / 3, -1 / 3),
    (-2 / 3, _ROOT / 3, -1 / 3),
    (0.0, 0.0, 1.0),
)


class WinogradConvolution(nn.Module):
    """A 3x3x3 `nn.Conv3d` on the CPU by Winograd's algorithm; output in the dtype of the input, float32 or bfloat16.

    slope  factor of negative outputs: 0 makes a ReLU, 1 no activation at all

    Raises OSError where the kernels are missing.
    """

    weights: Tensor
    bias: Tensor | None

    def __init__(self, convolution: nn.Conv3d, slope: float = 1.0) -> None:
        super().__init__()
        self.outputs, self.slope = convolution.out_channels, slope
        self.register_buffer("weights", pack(convolution.weight.detach()))
        bias = convolution.bias
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z, y, x], channels last."""
        # An operator is what torch.compile leaves alone; to call one, torch imports its compiler, which takes seconds.
        run = torch.ops.stackseg.convolve if torch.compiler.is_compiling() else convolve
        y: Tensor = run(x, self.weights, self.bias, self.outputs, self.slope)
        return y


def replace_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy of `module` in which every convolution that `is_replaceable` is a `WinogradConvolution`.

    A ReLU, LeakyReLU, or PReLU with one slope that follows in a sequence is fused with the convolution.

    Raises OSError where the kernels are missing.
    """
    # Only in a sequence is it known which module follows the convolution.
    fused = fuse_pairs(copy.deepcopy(module), _with_activation)
    return replace_modules(fused, lambda child: WinogradConvolution(child) if is_replaceable(child) else None)


def _with_activation(layer: nn.Module, activation: nn.Module) -> WinogradConvolution | None:
    slope = read_slope(activation)
    return WinogradConvolution(layer, slope) if is_replaceable(layer) and slope is not None else None


def count_replaceable(module: nn.Module) -> int:
    """Return how many convolutions of `module` can be replaced."""
    return sum(is_replaceable(child) for child in module.modules())


def is_replaceable(module: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Return whether `WinogradConvolution` computes what this module does."""
    return (
        is_plain(module, nn.Conv3d)
        and module.weight.dtype in DTYPES
        and module.weight.device.type == "cpu"
        and module.kernel_size == (3, 3, 3)
        and module.stride == module.dilation == (1, 1, 1)
        and module.padding in {(1, 1, 1), "same"}
        and module.padding_mode == "zeros"
        and module.groups == 1
        and module.in_channels % INPUTS == 0
        and module.out_channels % OUTPUTS == 0
    )


def pack(weight: Tensor) -> Tensor:
    """Transform weights [K, C, 3, 3, 3] to the sampling points, float32 [216 C K], in the order of the kernel's reads.

    Blocks of columns (outputs) follow each other, each as [216, C, columns].
    """
    sampling = torch.tensor(SAMPLING, dtype=torch.float64)
    outputs, inputs = weight.shape[:2]
    sampled = torch.einsum("iz,jy,lx,kczyx->ijlck", sampling, sampling, sampling, weight.double()).float()
    sampled = sampled.reshape(POINTS, inputs, outputs)
    KERNELS.require()
    widths = KERNELS.split_columns("stackseg_columns", outputs)
    return torch.cat([block.reshape(-1) for block in torch.split(sampled, widths, dim=2)])


def convolve(x: Tensor, weights: Tensor, bias: Tensor | None, outputs: int, slope: float) -> Tensor:
    """Convolve `x` [B, C, z, y, x] in float32 or bfloat16; `weights` as from `pack`, bias [K] float32.

    Raises MemoryError, and RuntimeError for other channels than there are weights for.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"no Winograd convolution of {x.dtype}")
    if x.dim() != 5 or POINTS * x.shape[1] * outputs != weights.numel():
        raise RuntimeError(f"no weights for the channels of {list(x.shape)}")
    x = x.contiguous(memory_format=torch.channels_last_3d)
    y = _empty(x, outputs)
    batch, channels, depth, height, width = x.shape
    sizes = (batch, depth, height, width, channels, outputs, TILES, x.dtype == torch.bfloat16)
    KernelCall(KERNELS, "stackseg_convolve", (x, weights, bias), y, sizes, (slope,)).run()
    return y


# Inductor keeps the layout of an operator's inputs as eager mode has it, which with one window is not channels last,
# and would convert them; this one takes any.
_operator = torch.library.custom_op("stackseg::convolve", mutates_args=(), tags=(torch.Tag.flexible_layout,))(convolve)


@_operator.register_fake
def _(x: Tensor, _weights: Tensor, _bias: Tensor | None, outputs: int, _slope: float) -> Tensor:
    return _empty(x, outputs)


def _empty(x: Tensor, outputs: int) -> Tensor:
    shape = (x.shape[0], outputs, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
