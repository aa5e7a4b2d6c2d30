"""3x3x3 convolutions on CPUs with an eighth of the usual multiplications, for images in float32 or bfloat16.

The algorithm is Winograd's F(4x4x4, 3x3x3) (Lavin and Gray 2016), described in `winograd.cpp`. It always computes in
float32; bfloat16 is only a storage format. Its rounding errors are several times those of a direct convolution, about
1e-5 relative to the scale of the scores. Larger tiles save up to 31% more multiplications. Their errors of up to 2.4e-4
are smaller than those of bfloat16 and TF32, so they are used for images in bfloat16 and, unless the precision of
products is `highest`, in float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from service.core.sections.computing import MatmulPrecision
from service.engine.cpu.kernel_call import SUPPORTED_DTYPES, KernelCall, Kernels
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

KERNELS = Kernels(["stackseg_convolve"], [("stackseg_columns", "q", "q"), ("stackseg_blocking", "qqqq", "q")])

# The kernel reads input channels in vectors of 8, and writes output channels in vectors of up to 16.
INPUT_CHANNEL_MULTIPLE = 8
OUTPUT_CHANNEL_MULTIPLE = 16

# Approximate number of output tiles processed together. More tiles would not fit in a core's second-level cache.
TILES_PER_BLOCK = 16
# Minimum number of large tiles in a window. With fewer tiles, reading the weights takes longer than multiplying because
# large tiles have up to 2.8 times as many weights.
MIN_LARGE_TILES = 32

Tile = tuple[int, int, int]
"""Number of outputs of a tile along (z, y, x), each 4 or 8."""
SMALL_TILE: Tile = (4, 4, 4)
LARGE_TILES: tuple[Tile, ...] = ((8, 4, 4), (8, 8, 4))

_SQRT_2 = 2**0.5
# Points of F(4, 3) and F(8, 3) in the order of `winograd_transforms.hpp`, except for infinity.
POINTS = {
    4: (0.0, _SQRT_2, -_SQRT_2, 1 / _SQRT_2, -1 / _SQRT_2),
    8: (0.0, 1.25, -1.25, 1 / 1.25, -1 / 1.25, 2.4, -2.4, 1 / 2.4, -1 / 2.4),
}


class SampledWeights(NamedTuple):
    """Weights at the points of a tile, float32 [points * C * K], in the order of the kernel.

    The values are a sequence of blocks of columns (output channels), each with shape [points, C, columns].
    """

    values: Tensor
    tile: Tile


class WinogradConvolution(nn.Module):
    """A 3x3x3 `nn.Conv3d` on the CPU, computed by Winograd's algorithm. Images are float32 or bfloat16.

    slope             negative slope of the fused activation: 0 for a ReLU, 1 for no activation
    matmul_precision  precision of float32 products, as named by torch; only `highest` excludes large tiles

    Raises OSError if the kernels are missing.
    """

    weights: Tensor
    bias: Tensor | None

    def __init__(
        self, convolution: nn.Conv3d, slope: float = 1.0, matmul_precision: MatmulPrecision = "highest"
    ) -> None:
        super().__init__()
        is_exact = convolution.weight.dtype == torch.float32 and matmul_precision == "highest"
        self.tiles = (SMALL_TILE,) if is_exact else (SMALL_TILE, *LARGE_TILES)
        self.out_channels, self.slope = convolution.out_channels, slope
        self._unpacked_weight = convolution.weight.detach()
        self.register_buffer("weights", pack_weights(self._unpacked_weight).values)
        bias = convolution.bias
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """Apply convolution and activation: [B, C, z, y, x] -> [B, K, z, y, x], channels last."""
        # torch.compile does not trace into a custom operator. Calling one imports torch's compiler, which takes
        # several seconds, so the operator is used only while compiling.
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.stackseg.convolve(x, self.weights, self.bias, self.out_channels, self.slope)
            return y
        weights = self._get_weights(choose_tile(x.shape[2:], self.tiles))
        return convolve(x, weights, self.bias, self.out_channels, self.slope)

    def _get_weights(self, tile: Tile) -> SampledWeights:
        if tile == SMALL_TILE:
            return SampledWeights(self.weights, tile)
        # Weights for large tiles are packed for the first window that uses them. A buffer counts as weights.
        name = f"weights_for_{'x'.join(map(str, tile))}"
        if name not in self._buffers:
            self.register_buffer(name, pack_weights(self._unpacked_weight, tile).values, persistent=False)
        return SampledWeights(self.get_buffer(name), tile)


def replace_convolutions(module: nn.Module, matmul_precision: MatmulPrecision = "highest") -> nn.Module:
    """Return a copy of `module` with a `WinogradConvolution` for every convolution for which `is_replaceable` is true.

    A ReLU, a LeakyReLU, or a PReLU with one slope is fused with the convolution that it follows in an `nn.Sequential`.

    Raises OSError if the kernels are missing.
    """

    def convert(layer: nn.Module, slope: float | None = 1.0) -> WinogradConvolution | None:
        if slope is None or not is_replaceable(layer):
            return None
        return WinogradConvolution(layer, slope, matmul_precision)

    # Only an `nn.Sequential` defines which module follows the convolution.
    fused_network = fuse_pairs(copy.deepcopy(module), lambda layer, activation: convert(layer, read_slope(activation)))
    return replace_modules(fused_network, convert)


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


def choose_tile(size: Sequence[int], tiles: Sequence[Tile] = (SMALL_TILE, *LARGE_TILES)) -> Tile:
    """Return the one of `tiles` with the fewest multiplications for windows of this size (z, y, x).

    The choice does not depend on the batch, because the scores of a window must be the same in every batch.
    """
    fitting_tiles = [tile for tile in tiles if tile == SMALL_TILE or _count_tiles(size, tile) >= MIN_LARGE_TILES]
    return min(fitting_tiles, key=lambda tile: _count_tiles(size, tile) * count_points(tile))


def _count_tiles(size: Sequence[int], tile: Tile) -> int:
    return math.prod(-(-length // outputs) for length, outputs in zip(size, tile, strict=True))


def count_points(tile: Tile) -> int:
    """Return the number of points at which a tile is sampled: two more than outputs along each axis."""
    return math.prod(outputs + 2 for outputs in tile)


def compute_weight_transform(outputs: int) -> Tensor:
    """Return matrix G of F(outputs, 3), float64 [outputs + 2, 3], which maps three weights to values at the points."""
    points = POINTS[outputs]
    scales = [math.prod(point - other for other in points if other != point) for point in points]
    rows = [[point**power / scale for power in range(3)] for point, scale in zip(points, scales, strict=True)]
    return torch.tensor([*rows, [0.0, 0.0, 1.0]], dtype=torch.float64)


def pack_weights(weight: Tensor, tile: Tile = SMALL_TILE) -> SampledWeights:
    """Transform weights [K, C, 3, 3, 3] to the points of `tile`."""
    transforms = [compute_weight_transform(outputs) for outputs in tile]
    out_channels, in_channels = weight.shape[:2]
    sampled_weights = torch.einsum("iz,jy,lx,kczyx->ijlck", *transforms, weight.double()).float()
    sampled_weights = sampled_weights.reshape(count_points(tile), in_channels, out_channels)
    KERNELS.require()
    widths = KERNELS.split_columns("stackseg_columns", out_channels)
    blocks = torch.split(sampled_weights, widths, dim=2)
    return SampledWeights(torch.cat([block.reshape(-1) for block in blocks]), tile)


def convolve(x: Tensor, weights: SampledWeights, bias: Tensor | None, out_channels: int, slope: float) -> Tensor:
    """Convolve `x` [B, C, z, y, x] in float32 or bfloat16, with weights from `pack_weights` and a float32 bias [K].

    Raises TypeError for other dtypes, RuntimeError if the channels do not match the weights, and MemoryError.
    """
    if x.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"Winograd convolutions do not support {x.dtype}")
    if x.dim() != 5 or count_points(weights.tile) * x.shape[1] * out_channels != weights.values.numel():
        raise RuntimeError(f"the channels of an input of shape {list(x.shape)} do not match the weights")
    x = x.contiguous(memory_format=torch.channels_last_3d)
    y = _allocate_output(x, out_channels)
    batch, channels, depth, height, width = x.shape
    is_bfloat16 = x.dtype == torch.bfloat16
    sizes = (batch, depth, height, width, channels, out_channels, TILES_PER_BLOCK, is_bfloat16, math.prod(weights.tile))
    KernelCall(KERNELS, "stackseg_convolve", (x, weights.values, bias), y, sizes, (slope,)).run()
    return y


# By default, inductor converts the inputs of an operator to the layout of eager mode, which is not channels last for a
# single window. The tag allows any layout.
@torch.library.custom_op("stackseg::convolve", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def convolve_with_small_tiles(
    x: Tensor, weights: Tensor, bias: Tensor | None, out_channels: int, slope: float
) -> Tensor:
    """Convolve like `convolve`, as an operator for torch.compile."""
    return convolve(x, SampledWeights(weights, SMALL_TILE), bias, out_channels, slope)


@convolve_with_small_tiles.register_fake
def _(x: Tensor, _weights: Tensor, _bias: Tensor | None, out_channels: int, _slope: float) -> Tensor:
    return _allocate_output(x, out_channels)


def _allocate_output(x: Tensor, out_channels: int) -> Tensor:
    shape = (x.shape[0], out_channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
