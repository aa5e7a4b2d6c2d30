"""MONAI's networks. `service.models.architectures` imports this module only when one of these networks is built.

`import monai` also imports optional libraries for plots, filters, files and language models, which takes several
seconds and 100 MiB. The networks do not need these libraries, so they are hidden from MONAI, which then treats them as
not installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The packages that MONAI's networks need, with the dependencies of PyTorch. All others are hidden. A list of hidden
# packages would not be sufficient: a library that is not listed, such as transformers, imports torch._dynamo and then a
# hidden package. MONAI ignores the error, but torch._dynamo remains partly imported, and torch.compile fails.
REQUIRED_PACKAGES = frozenset(
    [
        "functorch",
        "monai",
        "mpmath",
        "networkx",
        "numpy",
        "packaging",
        "sympy",
        "torch",
        "torchgen",
        "triton",
        "typing_extensions",
    ]
)
# Maximum number of blocks of a stage of SwinUNETR, and of levels of AttentionUnet. Published networks have up to 18.
MAX_DEPTH = 64
_FLEXIBLE_UNET_LOCK = threading.Lock()


class _HidingFinder(MetaPathFinder):
    """An import finder that hides packages from one thread. Other threads can still import them."""

    def __init__(self, visible_names: frozenset[str]) -> None:
        self._visible_names, self._thread = visible_names | sys.stdlib_module_names, threading.get_ident()

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: object = None, /) -> None:
        """Raise ModuleNotFoundError for hidden packages. Return None otherwise, so that other finders are used."""
        name = fullname.partition(".")[0]
        # Some private modules of the standard library have names that depend on the platform.
        is_visible = name in self._visible_names or name.startswith("_")
        if not is_visible and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{fullname} is hidden", name=fullname)


@contextmanager
def hide_packages_except(visible_names: frozenset[str]) -> Iterator[None]:
    """Hide all packages from imports of this thread within the context, except those listed and the standard library.

    Modules that have already been imported remain available.
    """
    finder = _HidingFinder(visible_names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


with hide_packages_except(REQUIRED_PACKAGES):
    from monai.networks.blocks import patchembedding, selfattention
    from monai.networks.nets import swin_unetr
    from monai.networks.nets.attentionunet import AttentionUnet
    from monai.networks.nets.basic_unet import BasicUNet, UpCat
    from monai.networks.nets.dynunet import DynUNet
    from monai.networks.nets.flexible_unet import FlexibleUNet
    from monai.networks.nets.mednext import MedNeXt
    from monai.networks.nets.segresnet import SegResNet
    from monai.networks.nets.segresnet_ds import SegResNetDS
    from monai.networks.nets.unet import UNet
    from monai.networks.nets.unetr import UNETR
    from monai.networks.nets.vnet import VNet


class _CompilableUpCat(UpCat):
    """MONAI's `UpCat` without `torch.jit.isinstance`, which causes graph breaks in `torch.compile`."""

    def forward(self, x: Tensor, x_e: Tensor | None) -> Tensor:
        """Upsample `x` [B, C, z, y, x], pad it if the skip connection `x_e` has odd sizes, and concatenate both."""
        x = self.upsample(x)
        if x_e is not None:
            padding = [
                int(length != skip_length) for length, skip_length in zip(x.shape[2:], x_e.shape[2:], strict=True)
            ]
            if self.is_pad and any(padding):
                x = functional.pad(
                    x, [side for end_padding in reversed(padding) for side in (0, end_padding)], "replicate"
                )
            x = torch.cat((x_e, x), dim=1)
        features: Tensor = self.convs(x)
        return features


def _make_compilable(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if type(module) is UpCat:
            module.__class__ = _CompilableUpCat
    return network


def _make_basic_unet(**arguments: Any) -> nn.Module:
    return _make_compilable(BasicUNet(**arguments))


def _make_flexible_unet(**arguments: Any) -> nn.Module:
    """Build a FlexibleUNet without downloading weights for its backbone. Its default is a network for 2D images."""
    if arguments.get("spatial_dims", 2) != 3:
        raise ValueError("spatial_dims must be 3, which is not the default of FlexibleUNet")
    # MONAI stores the arguments of the backbone in a global table before it builds the backbone.
    with _FLEXIBLE_UNET_LOCK:
        return _make_compilable(FlexibleUNet(**arguments | {"pretrained": False}))


def _move_channels(x: Tensor, pattern: str) -> Tensor:
    """Permute the axes of `x`, as `einops.rearrange` does for a pattern such as `b c d h w -> b d h w c`."""
    before, after = (side.split() for side in pattern.split("->"))
    return x.permute([before.index(axis) for axis in after])


class _Rearrange(nn.Module):
    """The rearrangements that UNETR uses, as modules with the interface of `einops.layers.torch.Rearrange`."""

    def __init__(self, pattern: str, **lengths: int) -> None:
        super().__init__()
        functions: dict[str, Callable[[Tensor, Mapping[str, int]], Tensor]] = {
            "b h (qkv l d) -> qkv b l h d": _split_heads,
            "b l h d -> b h (l d)": _join_heads,
            "b c (h p1) (w p2) (d p3) -> b (h w d) (p1 p2 p3 c)": _split_patches,
        }
        if pattern not in functions:
            raise ValueError(f"the rearrangement {pattern!r} is not supported")
        self._function, self._lengths = functions[pattern], lengths

    def forward(self, x: Tensor) -> Tensor:
        """Rearrange the elements of `x`."""
        return self._function(x, self._lengths)


def _split_heads(x: Tensor, lengths: Mapping[str, int]) -> Tensor:
    """Split the features of tokens [b, h, qkv * l * d] into queries, keys and values of l heads [qkv, b, l, h, d]."""
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, lengths["qkv"], lengths["l"], -1).permute(2, 0, 3, 1, 4)


def _join_heads(x: Tensor, _lengths: Mapping[str, int]) -> Tensor:
    """Join the features of l heads: [b, l, h, d] -> [b, h, l * d]."""
    return x.transpose(1, 2).flatten(2)


def _split_patches(x: Tensor, lengths: Mapping[str, int]) -> Tensor:
    """Convert an image [b, c, z, y, x] to patches of size (p1, p2, p3): [b, patches, p1 * p2 * p3 * c]."""
    batch, channels, *size = x.shape
    p1, p2, p3 = (lengths[name] for name in ("p1", "p2", "p3"))
    x = x.reshape(batch, channels, size[0] // p1, p1, size[1] // p2, p2, size[2] // p3, p3)
    return x.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4).flatten(1, 3)


# SwinUNETR and UNETR need einops, an optional package, only for permutations.
swin_unetr.rearrange = _move_channels
patchembedding.Rearrange = selfattention.Rearrange = _Rearrange


def _make_unetr(**arguments: Any) -> nn.Module:
    """Build a UNETR that does not store its attention, which would retain data of other requests."""
    return UNETR(**arguments | {"save_attn": False})


def _make_swin_unetr(**arguments: Any) -> nn.Module:
    """Build a SwinUNETR that computes attention with PyTorch's fused function, which does not change its tensors."""
    if arguments.get("use_hyena") or arguments.get("hyena_stages"):
        raise ValueError("use_hyena and hyena_stages are not supported")
    depths = arguments.get("depths", ())
    if not all(isinstance(depth, int) and 1 <= depth <= MAX_DEPTH for depth in depths):
        raise ValueError(f"depths must contain numbers from 1 to {MAX_DEPTH}")
    fixed_arguments = {"use_checkpoint": False, "use_flash_attention": True}
    return swin_unetr.SwinUNETR(**arguments | fixed_arguments)


def _make_3d_network(constructor: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    """Build a network. Raises ValueError if it is not for 3D images, or if an argument would have to be a function."""
    if arguments.get("spatial_dims", 3) != 3:
        raise ValueError(f"spatial_dims must be 3, not {arguments['spatial_dims']!r:.20}")
    if arguments.get("preprocess") is not None:
        raise ValueError("preprocess is not supported")
    if len(arguments.get("channels", ())) > MAX_DEPTH:
        raise ValueError(f"channels must have up to {MAX_DEPTH} levels")
    return constructor(**arguments)


CONSTRUCTORS: dict[str, Callable[..., nn.Module]] = {
    "UNet": UNet,
    "BasicUNet": _make_basic_unet,
    "DynUNet": DynUNet,
    "SegResNet": SegResNet,
    "AttentionUnet": partial(_make_3d_network, AttentionUnet),
    "VNet": partial(_make_3d_network, VNet),
    "SegResNetDS": partial(_make_3d_network, SegResNetDS),
    "MedNeXt": partial(_make_3d_network, MedNeXt),
    "SwinUNETR": partial(_make_3d_network, _make_swin_unetr),
    "UNETR": partial(_make_3d_network, _make_unetr),
    "FlexibleUNet": partial(_make_3d_network, _make_flexible_unet),
}
