"""Instance and group norms that preserve the channels-last layout.

ATen and inductor would convert tensors to the contiguous layout and back.

On a CPU, `norm.cpp` computes the norms for float32 and bfloat16. Its comments explain why it is faster and more
accurate than ATen. On other devices, in compiled graphs, and if the kernels are missing, torch computes the norms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.engine.cpu.kernel_call import SUPPORTED_DTYPES, KernelCall, Kernels
from service.engine.fusion import fuse_pairs, is_plain, read_slope, replace_modules

SPATIAL_AXES = (2, 3, 4)

KERNELS = Kernels(["stackseg_normalize"])


class ChannelsLastNorm(nn.Module):
    """A group norm over `groups` groups of channels. It is an instance norm if there are as many groups as channels.

    slope  negative slopes [C] of the activation after the norm, or None for no activation
    """

    weight: Tensor | None
    bias: Tensor | None
    slope: Tensor | None

    def __init__(self, groups: int, channels: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.groups, self.channels, self.eps = groups, channels, eps
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("slope", None)

    def fuse_activation(self, slope: Tensor) -> None:
        """Apply a (leaky) ReLU after the norm, with the negative slope `slope` [1] or [C]."""
        self.slope = slope.detach().expand(self.channels).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` [B, C, z, y, x], with moments in float32. The shape, dtype and layout stay the same."""
        is_cpu_image = x.device.type == "cpu" and x.dtype in SUPPORTED_DTYPES
        # A norm without weights accepts any number of channels, but the kernel reads a slope for each channel.
        if not torch.compiler.is_compiling() and is_cpu_image and x.shape[1] == self.channels and KERNELS.is_available:
            return self._run_kernel(x)
        variance, mean = _compute_moments(x.float())
        if self.groups < x.shape[1]:
            variance, mean = _combine_groups(variance, mean, self.groups)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        y = (x * scale[..., None, None, None] + shift[..., None, None, None]).to(x.dtype)
        return y if self.slope is None else functional.prelu(y, self.slope)

    def _run_kernel(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last_3d)
        y = torch.empty_like(x)
        batch, channels, depth, height, width = x.shape
        parameters = (None if tensor is None else tensor.float() for tensor in (self.weight, self.bias, self.slope))
        sizes = (batch, depth * height * width, channels, self.groups, x.dtype == torch.bfloat16)
        KernelCall(KERNELS, "stackseg_normalize", (x, *parameters), y, sizes, (self.eps,)).run()
        return y


def _compute_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean over the voxels, each [B, C]."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.var_mean(x, SPATIAL_AXES, correction=0)
    # On a CPU, ATen vectorizes sums over channels, but not variances.
    mean = x.mean(SPATIAL_AXES)
    return (x - mean[..., None, None, None]).square_().mean(SPATIAL_AXES), mean


def _combine_groups(variance: Tensor, mean: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of each group, repeated for all of its channels: two tensors [B, C]."""
    grouped_shape = (len(mean), groups, -1)
    variances, means = variance.view(grouped_shape), mean.view(grouped_shape)
    between_variance, group_mean = torch.var_mean(means, 2, correction=0, keepdim=True)
    group_variance = variances.mean(2, keepdim=True) + between_variance
    return group_variance.expand_as(variances).flatten(1), group_mean.expand_as(variances).flatten(1)


def replace_norms(module: nn.Module) -> nn.Module:
    """Replace, in place, every group norm, and every instance norm that has no running statistics.

    A ReLU, LeakyReLU or PReLU that follows the norm in an `nn.Sequential` is fused with it.
    """
    return replace_modules(fuse_pairs(module, _fuse_activation), _make_replacement)


def _fuse_activation(module: nn.Module, activation: nn.Module) -> ChannelsLastNorm | None:
    slopes, norm = _read_slopes(activation), _make_replacement(module)
    if norm is None or slopes is None:
        return None
    norm.fuse_activation(slopes)
    return norm


def _make_replacement(module: nn.Module) -> ChannelsLastNorm | None:
    if is_plain(module, nn.GroupNorm):
        return ChannelsLastNorm(module.num_groups, module.num_channels, module.weight, module.bias, module.eps)
    if is_plain(module, nn.InstanceNorm3d) and not module.track_running_stats:
        channels = module.num_features
        return ChannelsLastNorm(channels, channels, module.weight, module.bias, module.eps)
    return None


def _read_slopes(activation: nn.Module) -> Tensor | None:
    """Return the negative slopes of a (leaky) ReLU, [1] or [C], or None for any other activation."""
    if is_plain(activation, nn.PReLU):
        return activation.weight
    slope = read_slope(activation)
    return None if slope is None else torch.tensor([slope])
