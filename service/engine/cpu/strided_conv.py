"""Convolutions with equal kernel size and stride, including transposed ones, as one matrix product on a CPU.

oneDNN is as fast on large images, but on a small window its overhead accounts for a large part of the time.
The algorithm is described in `strided_conv.cpp`.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import SUPPORTED_DTYPES, KernelCall, Kernels
from service.engine.fusion import is_plain

Layer = nn.Conv3d | nn.ConvTranspose3d

# Minimum number of columns of the product. With fewer columns, vectors are partly empty but take as long as full ones.
MIN_COLUMNS = 8

PATCH_KERNEL = "stackseg_patches"
KERNELS = Kernels(
    [PATCH_KERNEL],
    [("stackseg_patch_lanes", "", "q"), ("stackseg_patch_columns", "q", "q"), ("stackseg_patch_pairs", "", "q")],
)


class StridedConvolution(nn.Module):
    """A replacement for a convolution for which `is_replaceable` is true, with channels-last input and output.

    It computes in the dtype of the layer, float32 or bfloat16.

    slope  negative slope of the fused activation: 0 for a ReLU, 1 for no activation

    Raises OSError if the kernels are missing.
    """

    weights: Tensor
    bias: Tensor

    def __init__(self, layer: Layer, slope: float = 1.0) -> None:
        super().__init__()
        KERNELS.require()
        self.is_transposed, self.slope = isinstance(layer, nn.ConvTranspose3d), slope
        self.dtype, self.in_channels, self.out_channels = layer.weight.dtype, layer.in_channels, layer.out_channels
        bz, by, bx = layer.kernel_size
        self.block = (bz, by, bx)
        run_length = self.in_channels * (1 if self.is_transposed else bx)
        self.has_paired_weights = (
            self.dtype == torch.bfloat16 and run_length % 2 == 0 and KERNELS.call("stackseg_patch_pairs") == 1
        )
        self.register_buffer("weights", self._pack(layer.weight.detach()))
        bias = torch.zeros(self.out_channels) if layer.bias is None else layer.bias.detach().float()
        self.register_buffer("bias", _pad_to_vectors(bias.repeat(bx if self.is_transposed else 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [B, C, z, y, x] -> [B, K, z / bz, y / by, x / bx], or the inverse if transposed."""
        if x.dtype != self.dtype or x.dim() != 5 or x.shape[1] != self.in_channels:
            raise RuntimeError(f"an input of shape {list(x.shape)} and dtype {x.dtype} does not match the weights")
        x = x.contiguous(memory_format=torch.channels_last_3d)
        size = [
            edge * step if self.is_transposed else edge // step
            for edge, step in zip(x.shape[2:], self.block, strict=True)
        ]
        y = x.new_empty(len(x), *size, self.out_channels).permute(0, 4, 1, 2, 3)
        sizes = (*self._list_sizes(x, y), self.has_paired_weights, x.dtype == torch.bfloat16)
        KernelCall(KERNELS, PATCH_KERNEL, (x, self.weights, self.bias, None), y, sizes, (self.slope,)).run()
        return y

    def _list_sizes(self, x: Tensor, y: Tensor) -> list[int]:
        """Return the sizes for the kernel, in the order that `strided_conv.cpp` documents."""
        ones = [1, 1, 1]
        if self.block == (1, 1, 1):
            # Treat all voxels of all windows as one line.
            line_shape = [1, 1, len(x) * math.prod(x.shape[2:])]
            return [1, *line_shape, *line_shape, self.in_channels, *ones, *line_shape, self.out_channels, *ones]
        input_block, output_block = (ones, self.block) if self.is_transposed else (self.block, ones)
        positions = (x if self.is_transposed else y).shape[2:]
        return [
            len(x),
            *positions,
            *x.shape[2:],
            self.in_channels,
            *input_block,
            *y.shape[2:],
            self.out_channels,
            *output_block,
        ]

    def _pack(self, weight: Tensor) -> Tensor:
        """Return the weights of a torch layer in the order in which the kernel reads them."""
        bz, by, bx = self.block
        if self.is_transposed:
            # Shape [rows of the output block, input channels, columns].
            runs = weight.permute(2, 3, 0, 4, 1).reshape(bz * by, self.in_channels, bx * self.out_channels)
        else:
            runs = weight.permute(2, 3, 4, 1, 0).reshape(1, bz * by * bx * self.in_channels, self.out_channels)
        blocks = [
            block.reshape(-1, 2, block.shape[1]).transpose(1, 2) if self.has_paired_weights else block.float()
            for run in _pad_to_vectors(runs)
            for block in torch.split(run, KERNELS.split_columns("stackseg_patch_columns", run.shape[1]), dim=1)
        ]
        return torch.cat([block.reshape(-1) for block in blocks])


def fuse_addition(call: KernelCall, result: Tensor, other: Tensor) -> KernelCall | None:
    """Return a kernel call that also adds `other` to its output, bit-identical to a separate addition.

    Return None if `call` runs a different kernel, writes to a tensor other than `result`, or already adds a tensor.
    """
    *inputs, addend = call.inputs
    if call.kernel != PATCH_KERNEL or addend is not None or call.output.data_ptr() != result.data_ptr():
        return None
    if (call.output.dtype, call.output.numel()) != (result.dtype, result.numel()):
        return None
    return None if other.data_ptr() == result.data_ptr() else call._replace(inputs=(*inputs, other))


def is_replaceable(module: nn.Module) -> TypeGuard[Layer]:
    """Return whether `StridedConvolution` can replace this module without being much slower than oneDNN."""
    if not (is_plain(module, nn.Conv3d) or is_plain(module, nn.ConvTranspose3d)) or module.padding_mode != "zeros":
        return False
    columns = module.out_channels * (module.kernel_size[2] if isinstance(module, nn.ConvTranspose3d) else 1)
    return (
        columns >= MIN_COLUMNS
        and module.weight.dtype in SUPPORTED_DTYPES
        and module.weight.device.type == "cpu"
        and module.kernel_size == module.stride
        and module.padding in {(0, 0, 0), "valid"}
        and (module.output_padding, module.dilation, module.groups) == ((0, 0, 0), (1, 1, 1), 1)
    )


def _pad_to_vectors(x: Tensor) -> Tensor:
    """Pad the last axis with zeros to a multiple of the vector width."""
    return nn.functional.pad(x, (0, -x.shape[-1] % KERNELS.call("stackseg_patch_lanes")))
