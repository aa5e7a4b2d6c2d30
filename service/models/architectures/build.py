"""Build the network that a model file specifies by the name and arguments of an architecture."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from service.core.errors import BrokenModel
from service.models.architectures import nnunet, pytorch3dunet
from service.models.architectures.cellpose import CellposeNet
from service.models.architectures.cellpose_sam import CellposeSam
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.architectures.stardist import StarDistResNet, StarDistUNet
from service.models.spec import Architecture

# Maximum number of calls to torch functions while a network is constructed. Each layer makes a few calls.
MAX_CONSTRUCTION_CALLS = 20_000


def _make_monai_constructor(name: str) -> Callable[..., nn.Module]:
    """Return a constructor of a MONAI network that imports MONAI only when called, because the import is slow."""

    def construct(**arguments: Any) -> nn.Module:
        module = import_module("service.models.architectures.monai")
        network: nn.Module = module.CONSTRUCTORS[name](**arguments)
        return network

    return construct


MONAI_NETWORKS = (
    *("UNet", "BasicUNet", "DynUNet", "SegResNet", "AttentionUnet", "VNet", "SegResNetDS"),
    *("MedNeXt", "SwinUNETR", "UNETR", "FlexibleUNet"),
)
ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "ShuffleUNet": ShuffleUNet,
    **{name: _make_monai_constructor(name) for name in MONAI_NETWORKS},
    "CellposeNet": CellposeNet,
    "CellposeSam": CellposeSam,
    "StarDistUNet": StarDistUNet,
    "StarDistResNet": StarDistResNet,
    **nnunet.CONSTRUCTORS,
    **pytorch3dunet.CONSTRUCTORS,
}


# Errors that constructors raise for invalid arguments.
_ARGUMENT_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


def describe_tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's tensors by name, without allocating the tensors.

    Raises the same errors as `build_network`.
    """
    # The call limit can interrupt the exit of an inner `no_grad`. The outer `no_grad` restores the gradient mode.
    with torch.no_grad(), torch.device("meta"), _CallLimit():
        return {name: tuple(tensor.shape) for name, tensor in build_network(architecture).state_dict().items()}


def count_tensor_elements(architecture: Architecture) -> int:
    """Return the number of elements in a network's tensors, without allocating the tensors.

    Raises the same errors as `build_network`.
    """
    return sum(map(math.prod, describe_tensors(architecture).values()))


class _CallLimit(TorchFunctionMode):
    """A mode that stops the construction of a network if the arguments define an excessive number of layers."""

    def __init__(self) -> None:
        super().__init__()
        self._call_count = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._call_count += 1
        if self._call_count > MAX_CONSTRUCTION_CALLS:
            raise ValueError("the arguments define too many layers")
        if func is torch.Tensor.normal_:
            # For meta tensors, torch would import its compiler here while this function mode and the meta device mode
            # are active. The import takes several seconds and, on a host with a GPU, leaves partially imported modules
            # behind.
            return args[0]
        if func is torch.linspace:
            # SwinUNETR reads the values of this short list, which meta tensors do not have.
            kwargs = {**(kwargs or {}), "device": "cpu"}
        return func(*args, **(kwargs or {}))


def build_network(architecture: Architecture) -> nn.Module:
    """Build a newly initialized network, in float32 on the CPU.

    Raises BrokenModel if the name is unknown or the arguments are invalid.
    """
    constructor = ARCHITECTURES.get(architecture.name)
    if constructor is None:
        raise BrokenModel(f"Unknown architecture {architecture.name!r}; choose one of {', '.join(ARCHITECTURES)}.")
    try:
        return constructor(**architecture.arguments)
    except _ARGUMENT_ERRORS as error:
        raise BrokenModel(f"{architecture.name} does not accept the arguments in the model file: {error}") from error
