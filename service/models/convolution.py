"""A convolution module around weights that exist already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def make_convolution(
    weight: Tensor, bias: Tensor | None, *, groups: int, transposed: bool = False, **settings: Any
) -> nn.Conv3d | nn.ConvTranspose3d:
    """Return an `nn.Conv3d`, or an `nn.ConvTranspose3d`, whose parameters are `weight` and `bias`.

    `weight` is [out, in / groups, z, y, x], of a transposed convolution [in, out / groups, z, y, x]. `settings` are
    further keyword arguments of the module.
    """
    module_type: Any = nn.ConvTranspose3d if transposed else nn.Conv3d
    channels = (weight.shape[1] * groups, weight.shape[0])
    with torch.device("meta"):
        module: nn.Conv3d | nn.ConvTranspose3d = module_type(
            *(reversed(channels) if transposed else channels),
            tuple(weight.shape[2:]),
            groups=groups,
            bias=False,
            **settings,
        )
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module
