"""Space-to-depth and depth-to-space on a CPU, in channels last. Several voxels are moved as one word."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from service.engine.cpu.kernel_call import KernelCall, Kernels
from service.engine.fusion import is_plain
from service.models.architectures import shuffle_unet

KERNELS = Kernels(["stackseg_space_to_depth", "stackseg_depth_to_space"])


class _Shuffle(nn.Module):
    def __init__(self, block: tuple[int, int, int]) -> None:
        super().__init__()
        KERNELS.require()
        self.block = block


class SpaceToDepth(_Shuffle):
    """`shuffle_unet.SpaceToDepth` with channels-last output. Raises OSError if the kernels are missing."""

    def forward(self, x: Tensor) -> Tensor:
        """Move blocks of voxels into channels: [B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        batch, channels, *size = x.shape
        if any(edge % step for edge, step in zip(size, self.block, strict=True)):
            raise RuntimeError(f"an image of {size} voxels cannot be divided into blocks of {list(self.block)}")
        blocks = [edge // step for edge, step in zip(size, self.block, strict=True)]
        y = x.new_empty(batch, *blocks, channels, *self.block)
        sizes = (batch, channels, *blocks, *self.block, x.element_size())
        KernelCall(KERNELS, "stackseg_space_to_depth", (x.contiguous(),), y, sizes).run()
        return y.view(batch, *blocks, -1).permute(0, 4, 1, 2, 3)


class DepthToSpace(_Shuffle):
    """`shuffle_unet.DepthToSpace` with contiguous output. Raises OSError if the kernels are missing."""

    def forward(self, x: Tensor) -> Tensor:
        """Move channels into blocks of voxels: [B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        batch, channels, *blocks = x.shape
        bz, by, bx = self.block
        out_channels, remainder = divmod(channels, bz * by * bx)
        if remainder:
            raise RuntimeError(f"{channels} channels cannot be divided into blocks of {list(self.block)}")
        y = x.new_empty(batch, out_channels, *(edge * step for edge, step in zip(blocks, self.block, strict=True)))
        sizes = (batch, out_channels, *blocks, *self.block, x.element_size())
        x = x.contiguous(memory_format=torch.channels_last_3d)
        KernelCall(KERNELS, "stackseg_depth_to_space", (x,), y, sizes).run()
        return y


def make_replacement(module: nn.Module) -> nn.Module | None:
    """Return the faster equivalent of a pixel shuffle, or None for any other module."""
    if is_plain(module, shuffle_unet.SpaceToDepth):
        return SpaceToDepth(module.block)
    return DepthToSpace(module.block) if is_plain(module, shuffle_unet.DepthToSpace) else None
