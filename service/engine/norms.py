"""Instance and group norms that keep channels last, where ATen's and inductor's convert to contiguous and back.

ATen has no 3D instance norm for that layout, its group norm loses digits there (1e-3 of a standard deviation where the
mean is five of them), and inductor takes both apart in the order of contiguous tensors. Summed over voxels as vectors
of channels, they take one pass to measure and one to apply, with whatever is fused behind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOXELS = (2, 3, 4)


class ChannelsLastNorm(nn.Module):
    """What `nn.GroupNorm` computes over `groups` of channels; as many groups as channels make an instance norm."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> the same shape, dtype and layout; moments are taken in float32."""
        variance, mean = _moments(x.float())
        if self.groups < x.shape[1]:
            variance, mean = _of_groups(variance, mean, self.groups)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return (x * scale[..., None, None, None] + shift[..., None, None, None]).to(x.dtype)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean over the voxels, [B, C] each."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.var_mean(x, VOXELS, correction=0)
    # ATen's sums run along vectors of channels on a CPU, its variances do not.
    mean = x.mean(VOXELS)
    return (x - mean[..., None, None, None]).square_().mean(VOXELS), mean


def _of_groups(variance: Tensor, mean: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Of the channels of each group together, repeated for each of its channels."""
    grouped = (len(mean), groups, -1)
    within, means = variance.view(grouped), mean.view(grouped)
    between, middle = torch.var_mean(means, 2, correction=0, keepdim=True)
    together = within.mean(2, keepdim=True) + between
    return together.expand_as(within).flatten(1), middle.expand_as(within).flatten(1)


def lay_out(module: nn.Module) -> nn.Module:
    """Replace every instance norm without running statistics, and every group norm, in place."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    for name, child in module.named_children():
        replacement = _replacement(child)
        if replacement is None:
            lay_out(child)
        else:
            module._modules[name] = replacement
    return module


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.GroupNorm):
        return ChannelsLastNorm(module.num_groups, module.weight, module.bias, module.eps)
    if isinstance(module, nn.InstanceNorm3d) and not module.track_running_stats:
        return ChannelsLastNorm(module.num_features, module.weight, module.bias, module.eps)
    return None
