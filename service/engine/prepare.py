"""Prepare a module for any engine: fold batch norms, and convert the dtype and the memory format."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from service.engine.cpu import norm
from service.engine.fusion import fuse_pairs, is_plain


class Float32Scores(nn.Module):
    """A wrapper that converts the scores of a network to float32, because blending sums many of them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 scores: [B, C, z, y, x] -> [B, K, z, y, x]."""
        scores: Tensor = self.network(x)
        return scores.float()


def prepare(
    network: nn.Module, device: torch.device, dtype: torch.dtype, memory_format: torch.memory_format
) -> nn.Module:
    """Return a copy of `network` for inference on `device`: batch norms folded, weights in `dtype` and `memory_format`.

    Folding happens in float32, before the conversion, so that every weight is rounded to a smaller dtype only once.
    With channels last, the other norms are replaced with norms that preserve that format.
    """
    folded_network = fold_batch_norms(copy.deepcopy(network).eval())
    formatted_network = (
        norm.replace_norms(folded_network) if memory_format == torch.channels_last_3d else folded_network
    )
    device_network = formatted_network.to(device=device, dtype=dtype)
    # Module.to rejects a 3D format if any tensor of the module has 4 dimensions, so convert tensors individually.
    for parameter in device_network.parameters():
        if parameter.dim() == 5:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return Float32Scores(device_network).eval().requires_grad_(requires_grad=False)


def fold_batch_norms(module: nn.Module) -> nn.Module:
    """Fold every batch norm that directly follows a convolution in an `nn.Sequential` into that convolution, in place.

    Only `nn.Sequential` containers, including nested ones, reveal the order of calls without tracing. Other modules
    stay unchanged.
    """
    return fuse_pairs(module, _fold)


def _fold(convolution: nn.Module, norm: nn.Module) -> nn.Module | None:
    if not is_plain(norm, nn.BatchNorm3d) or not norm.track_running_stats:
        return None
    if is_plain(convolution, nn.ConvTranspose3d) and convolution.groups == 1:
        return fuse_conv_bn_eval(convolution, norm, transpose=True)
    return fuse_conv_bn_eval(convolution, norm) if is_plain(convolution, nn.Conv3d) else None
