"""3D convolutions whose gradients in BF16 are correct on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _SafeConv3d(nn.Conv3d):
    """A 3D convolution that uses float32 for images with more than one plane but fewer planes than the kernel spans.

    For such images, oneDNN computes the BF16 gradient of the weights from uninitialized memory, which results in huge
    or infinite values. This was observed with PyTorch 2.13 on Zen 4.
    """

    def forward(self, x: Tensor, /) -> Tensor:
        """Return the convolution [B, K, z, y, x] of an image [B, C, z, y, x]."""
        kernel_extent = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        if not 1 < x.shape[2] < kernel_extent:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def make_convolutions_safe(network: nn.Module) -> None:
    """Convert all 3D convolutions of `network` to `_SafeConv3d` in place. Tensors and their names do not change."""
    for module in network.modules():
        if type(module) is nn.Conv3d:
            module.__class__ = _SafeConv3d
