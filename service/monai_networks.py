"""MONAI's networks, where they are needed; `service.networks` imports this module with the first of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.networks.nets.basic_unet import BasicUNet, UpCat
from monai.networks.nets.dynunet import DynUNet
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from torch import Tensor, nn
from torch.nn import functional


class _UpCat(UpCat):
    """MONAI's, without its `torch.jit.isinstance`, over which `torch.compile` breaks the graph."""

    def forward(self, x: Tensor, x_e: Tensor | None) -> Tensor:
        """[B, C, z, y, x], to be enlarged, and what is joined to it; an odd edge of that gets its last plane twice."""
        x = self.upsample(x)
        if x_e is not None:
            missing = [int(have != want) for have, want in zip(x.shape[2:], x_e.shape[2:], strict=True)]
            if self.is_pad and any(missing):
                x = functional.pad(x, [side for after in reversed(missing) for side in (0, after)], "replicate")
            x = torch.cat((x_e, x), dim=1)
        joined: Tensor = self.convs(x)
        return joined


def _basic_unet(**arguments: Any) -> nn.Module:
    network = BasicUNet(**arguments)
    for module in network.modules():
        if type(module) is UpCat:
            module.__class__ = _UpCat
    return network


CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {
    "UNet": UNet,
    "BasicUNet": _basic_unet,
    "DynUNet": DynUNet,
    "SegResNet": SegResNet,
}
