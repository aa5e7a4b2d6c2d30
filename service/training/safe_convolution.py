"""Convolutions whose gradients are right in BF16 on a CPU, where oneDNN's are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _SafeConv3d(nn.Conv3d):
    """A 3D convolution that computes in float32 where its image has fewer planes than its kernel, but several.

    There oneDNN's gradient of the weights in BF16 holds whatever was in memory, with torch 2.13 on Zen 4: infinite
    now and then, huge otherwise.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return the convolution [B, K, z, y, x] of an image [B, C, z, y, x]."""
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        if not 1 < input.shape[2] < reach:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def make_convolutions_safe(network: nn.Module) -> None:
    """Make every 3D convolution of `network` a `_SafeConv3d`, in place; tensors and their names stay as they are."""
    for module in network.modules():
        if type(module) is nn.Conv3d:
            module.__class__ = _SafeConv3d
