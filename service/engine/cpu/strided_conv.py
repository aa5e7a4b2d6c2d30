"""Convolutions whose kernel is as large as their stride, and transposed ones, on a CPU: single matrix products.

oneDNN's are as fast where there is much to compute, but theirs of a small window is bookkeeping for a large part.
`patches.cpp` says how these work.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import Call, Steps
from service.engine.fusion import ordinary

Layer = nn.Conv3d | nn.ConvTranspose3d

DTYPES = (torch.float32, torch.bfloat16)

# Vectors that are not full take as long as those that are.
COLUMNS = 8

STEP = "stackseg_patches"
KERNEL = Steps(
    Path(__file__).with_suffix(".cpp"),
    [STEP],
    "Strided convolutions take longer",
    [("stackseg_patch_lanes", "", "q"), ("stackseg_patch_columns", "q", "q"), ("stackseg_patch_pairs", "", "q")],
)


class Convolution(nn.Module):
    """What a float32 or bfloat16 `layer` on the CPU computes that `suits`, in its dtype; channels last in and out.

    slope  what is negative is multiplied by it: 0 makes a rectifier, 1 no activation at all

    Raises OSError where the kernel cannot be compiled.
    """

    weights: Tensor
    bias: Tensor

    def __init__(self, layer: Layer, slope: float = 1.0) -> None:
        super().__init__()
        KERNEL.load()
        self.transposed, self.slope = isinstance(layer, nn.ConvTranspose3d), slope
        self.dtype, self.inputs, self.outputs = layer.weight.dtype, layer.in_channels, layer.out_channels
        bz, by, bx = layer.kernel_size
        self.block = (bz, by, bx)
        run = self.inputs * (1 if self.transposed else bx)
        self.paired = self.dtype == torch.bfloat16 and run % 2 == 0 and KERNEL.number("stackseg_patch_pairs") == 1
        self.register_buffer("weights", self._pack(layer.weight.detach()))
        bias = torch.zeros(self.outputs) if layer.bias is None else layer.bias.detach().float()
        self.register_buffer("bias", _whole(bias.repeat(bx if self.transposed else 1)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, K, z / bz, y / by, x / bx], or times these where it is transposed."""
        if x.dtype != self.dtype or x.dim() != 5 or x.shape[1] != self.inputs:
            raise RuntimeError(f"no weights for {list(x.shape)} of {x.dtype}")
        x = x.contiguous(memory_format=torch.channels_last_3d)
        size = [
            edge * step if self.transposed else edge // step for edge, step in zip(x.shape[2:], self.block, strict=True)
        ]
        y = x.new_empty(len(x), *size, self.outputs).permute(0, 4, 1, 2, 3)
        sizes = (*self._sizes(x, y), self.paired, x.dtype == torch.bfloat16)
        Call(KERNEL, STEP, (x, self.weights, self.bias, None), y, sizes, (self.slope,)).run()
        return y

    def _sizes(self, x: Tensor, y: Tensor) -> list[int]:
        """Windows and positions, then of `x` and `y` voxels, channels, and voxels of a position."""
        ones = [1, 1, 1]
        if self.block == (1, 1, 1):
            # All voxels of all windows as one line.
            line = [1, 1, len(x) * math.prod(x.shape[2:])]
            return [1, *line, *line, self.inputs, *ones, *line, self.outputs, *ones]
        read, written = (ones, self.block) if self.transposed else (self.block, ones)
        positions = (x if self.transposed else y).shape[2:]
        return [len(x), *positions, *x.shape[2:], self.inputs, *read, *y.shape[2:], self.outputs, *written]

    def _pack(self, weight: Tensor) -> Tensor:
        """The weights of torch's layer as the kernel reads them."""
        bz, by, bx = self.block
        if self.transposed:
            # [runs of the result, inputs, columns]
            runs = weight.permute(2, 3, 0, 4, 1).reshape(bz * by, self.inputs, bx * self.outputs)
        else:
            runs = weight.permute(2, 3, 4, 1, 0).reshape(1, bz * by * bx * self.inputs, self.outputs)
        blocks = [
            block.reshape(-1, 2, block.shape[1]).transpose(1, 2) if self.paired else block.float()
            for run in _whole(runs)
            for block in torch.split(run, _blocks(run.shape[1]), dim=1)
        ]
        return torch.cat([block.reshape(-1) for block in blocks])


def plus(call: Call, result: Tensor, other: Tensor) -> Call | None:
    """The call that also adds `other` to what it writes, and gives the same to the bit.

    None where `call` is none of this kernel, does not write `result` and nothing else, or adds something already.
    """
    *others, added = call.read
    if call.step != STEP or added is not None or call.written.data_ptr() != result.data_ptr():
        return None
    if (call.written.dtype, call.written.numel()) != (result.dtype, result.numel()):
        return None
    return None if other.data_ptr() == result.data_ptr() else call._replace(read=(*others, other))


def suits(module: nn.Module) -> TypeGuard[Layer]:
    """Whether `Convolution` computes what this module does, and as fast as oneDNN: not where there are few columns."""
    if not (ordinary(module, nn.Conv3d) or ordinary(module, nn.ConvTranspose3d)) or module.padding_mode != "zeros":
        return False
    columns = module.out_channels * (module.kernel_size[2] if isinstance(module, nn.ConvTranspose3d) else 1)
    return (
        columns >= COLUMNS
        and module.weight.dtype in DTYPES
        and module.weight.device.type == "cpu"
        and module.kernel_size == module.stride
        and module.padding in {(0, 0, 0), "valid"}
        and module.output_padding == (0, 0, 0)
        and module.dilation == (1, 1, 1)
        and module.groups == 1
    )


def _whole(x: Tensor) -> Tensor:
    """With zeros behind the last axis, up to whole vectors."""
    return nn.functional.pad(x, (0, -x.shape[-1] % KERNEL.number("stackseg_patch_lanes")))


def _blocks(columns: int) -> list[int]:
    """How many columns of weights the kernel reads together, from the first to the last."""
    blocks = list[int]()
    while (left := columns - sum(blocks)) > 0:
        blocks.append(KERNEL.number("stackseg_patch_columns", left))
    return blocks
