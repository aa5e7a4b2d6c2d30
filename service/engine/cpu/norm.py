"""Instance and group norms that keep channels last, where ATen's and inductor's convert to contiguous and back.

ATen has no 3D instance norm for that layout, its group norm loses digits there (1e-3 of a standard deviation where the
mean is five of them), and inductor takes both apart in the order of contiguous tensors. Summed over voxels as vectors
of channels, they take one pass to measure and one to apply, with the activation behind them: `norms.cpp` does that for
float32 and bfloat16 on a CPU, and torch elsewhere, in compiled graphs, and where there is no C++ compiler.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.engine.cpu.kernel_call import Call, Steps
from service.engine.fusion import neighbours, ordinary, replace, slope

DTYPES = (torch.float32, torch.bfloat16)
VOXELS = (2, 3, 4)

KERNEL = Steps(Path(__file__).with_suffix(".cpp"), ["stackseg_normalise"], "Norms take several times as long")


class ChannelsLastNorm(nn.Module):
    """What `nn.GroupNorm` computes over `groups` of channels; as many groups as channels make an instance norm.

    slope  [C]: what is negative is multiplied by it, once it is normalised; None: nothing follows
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

    def activate(self, slope: Tensor) -> None:
        """Let an activation follow, `slope` [1] or [C]."""
        self.slope = slope.detach().expand(self.channels).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> the same shape, dtype and layout; moments are taken in float32."""
        on_cpu = x.device.type == "cpu" and x.dtype in DTYPES
        # Norms without weights may be given other channels than they state; the kernel reads a slope for each.
        if not torch.compiler.is_compiling() and on_cpu and x.shape[1] == self.channels:
            KERNEL.prepare()
            if KERNEL.ready:
                return self._in_one(x)
        variance, mean = _moments(x.float())
        if self.groups < x.shape[1]:
            variance, mean = _of_groups(variance, mean, self.groups)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        y = (x * scale[..., None, None, None] + shift[..., None, None, None]).to(x.dtype)
        return y if self.slope is None else functional.prelu(y, self.slope)

    def _in_one(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last_3d)
        y = torch.empty_like(x)
        batch, channels, depth, height, width = x.shape
        weights = (None if each is None else each.float() for each in (self.weight, self.bias, self.slope))
        sizes = (batch, depth * height * width, channels, self.groups, x.dtype == torch.bfloat16)
        Call(KERNEL, "stackseg_normalise", (x, *weights), y, sizes, (self.eps,)).run()
        return y


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
    """Replace every instance norm without running statistics, and every group norm, in place.

    Rectifiers that follow in a sequence are taken in, leaky and parametric ones included.
    """
    for step, following in neighbours(module):
        slopes = _slope(following.module)
        norm = _replacement(step.module) if slopes is not None else None
        if norm is not None and slopes is not None:
            norm.activate(slopes)
            step.put(norm)
            following.put(nn.Identity())
    return replace(module, _replacement)


def _replacement(module: nn.Module) -> ChannelsLastNorm | None:
    if ordinary(module, nn.GroupNorm):
        return ChannelsLastNorm(module.num_groups, module.num_channels, module.weight, module.bias, module.eps)
    if ordinary(module, nn.InstanceNorm3d) and not module.track_running_stats:
        channels = module.num_features
        return ChannelsLastNorm(channels, channels, module.weight, module.bias, module.eps)
    return None


def _slope(activation: nn.Module) -> Tensor | None:
    """What it multiplies by what is negative, [1] or [C]."""
    if ordinary(activation, nn.PReLU):
        return activation.weight
    number = slope(activation)
    return None if number is None else torch.tensor([number])
