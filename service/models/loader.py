"""Networks by name, and model folder -> torch module with its weights.

Every network maps float [B, C, z, y, x] to raw scores [B, K, z, y, x]; activations belong to the decoding.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.onnx.network import load_onnx
from service.models.repository import Architecture, ModelSpec
from service.models.torch_export import load_exported
from service.models.torchscript import load_torchscript

Network = Callable[[Tensor], Tensor]
"""What an engine makes of a module and windows are run through: [B, C, z, y, x] -> [B, K, z, y, x], one fixed shape."""


def space_to_depth(x: Tensor, block: Sequence[int]) -> Tensor:
    """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx], every block of voxels becoming channels."""
    batch, channels, *size = x.shape
    bz, by, bx = block
    z, y, w = (edge // b for edge, b in zip(size, block, strict=True))
    x = x.reshape(batch, channels, z, bz, y, by, w, bx).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels * bz * by * bx, z, y, w)


def depth_to_space(x: Tensor, block: Sequence[int]) -> Tensor:
    """The inverse of `space_to_depth` (sub-pixel shuffle of Shi et al. 2016, in three dimensions)."""
    batch, channels, z, y, w = x.shape
    bz, by, bx = block
    outputs = channels // (bz * by * bx)
    x = x.reshape(batch, outputs, bz, by, bx, z, y, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(batch, outputs, z * bz, y * by, w * bx)


class _Shuffle(nn.Module):
    """Moves voxels of blocks [bz, by, bx] into channels or back, as a module that an engine can replace."""

    def __init__(self, block: Sequence[int]) -> None:
        super().__init__()
        bz, by, bx = block
        self.block = (bz, by, bx)


class SpaceToDepth(_Shuffle):
    """`space_to_depth`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, C * prod(block), z / bz, y / by, x / bx]."""
        return space_to_depth(x, self.block)


class DepthToSpace(_Shuffle):
    """`depth_to_space`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, K * prod(block), z, y, x] -> [B, K, z * bz, y * by, x * bx]."""
        return depth_to_space(x, self.block)


class _Block(nn.Sequential):
    """Twice 3x3x3 convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv3d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm3d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class ShuffleUNet(nn.Module):
    """U-Net (Cicek et al. 2016) that works on blocks of voxels and shuffles its scores back to single voxels.

    The widest layers of a U-Net are those at full resolution, and a convolution that reads one channel keeps a matrix
    unit idle. Here `space_to_depth` turns each block of voxels into channels first, so that the layers at the
    top run on 1 / prod(block) of the positions. Skip connections are added, which halves the decoder's first
    convolutions. Every edge of the input must be a multiple of block * 2 ** (len(widths) - 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int] = (32, 48, 96, 96),
        block: Sequence[int] = (2, 2, 2),
    ) -> None:
        super().__init__()
        factor = math.prod(block)
        self.unfold, self.fold = SpaceToDepth(block), DepthToSpace(block)
        levels = list(itertools.pairwise(widths))
        self.stem = _Block(in_channels * factor, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(above, below, 2, stride=2, bias=False),
                nn.BatchNorm3d(below),
                nn.ReLU(inplace=True),
                _Block(below, below),
            )
            for above, below in levels
        )
        self.up = nn.ModuleList(nn.ConvTranspose3d(below, above, 2, stride=2) for above, below in levels)
        self.merge = nn.ModuleList(_Block(above, above) for above, _ in levels)
        self.head = nn.Conv3d(widths[0], out_channels * factor, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, z, y, x] -> [B, out_channels, z, y, x]."""
        features = [self.stem(self.unfold(x))]
        for down in self.down:
            features.append(down(features[-1]))
        top = features.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            # In place: fresh memory for another sum costs more than the sum.
            top = merge(up(top).add_(features.pop()))
        scores: Tensor = self.fold(self.head(top))
        return scores


def _from_monai(name: str) -> Callable[..., nn.Module]:
    """Makes MONAI's network of that name. Importing MONAI takes longer than all that a model of ours needs to start."""

    def make(**arguments: Any) -> nn.Module:
        constructors: dict[str, Callable[..., nn.Module]] = import_module(
            "service.models.monai_architectures"
        ).CONSTRUCTORS
        return constructors[name](**arguments)

    return make


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "ShuffleUNet": ShuffleUNet,
    **{name: _from_monai(name) for name in ("UNet", "BasicUNet", "DynUNet", "SegResNet")},
}


# Files that bring a network of their own.
_OWN: dict[str, Callable[[Path], nn.Module]] = {
    "torchscript": load_torchscript,
    "exported": load_exported,
    "onnx": load_onnx,
}


def build(architecture: Architecture) -> nn.Module:
    """A freshly initialised network, float32 on the CPU. Raises BrokenModel for unknown names and bad arguments."""
    constructor = ARCHITECTURES.get(architecture.name)
    if constructor is None:
        raise BrokenModel(f"There is no architecture {architecture.name!r}; known are {', '.join(ARCHITECTURES)}.")
    try:
        return constructor(**architecture.arguments)
    except (TypeError, ValueError, IndexError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise BrokenModel(f"{architecture.name} does not take the arguments in the model file: {error}") from error


def run(network: nn.Module, x: Tensor) -> Tensor:
    """The scores of `network` for `x`."""
    scores: Tensor = network(x)
    return scores


def load(spec: ModelSpec, first: Callable[[nn.Module, Tensor], Tensor] = run) -> nn.Module:
    """The network of a model with its weights, float32 on the CPU, in evaluation mode, gradients off.

    first  computes the scores of a first window, which are checked; it may look at how that is done

    Raises BrokenModel where the weights do not fit, and where scores do not have the shape that the model file states.
    """
    if spec.architecture is not None:
        network = _with_weights(spec.architecture, spec)
    else:
        network = _OWN[spec.weights.kind](spec.weights_path)
    network = network.eval().requires_grad_(requires_grad=False).float()
    _check_shapes(network, spec, first)
    return network


def is_sequence(module: nn.Module) -> bool:
    """Whether it calls its children in turn, and does nothing else; not where `observed` saw them called otherwise."""
    whole = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return whole and not getattr(module, _APART, False)


def parts(network: nn.Module) -> Iterator[nn.Module]:
    """All modules within `network`, itself included, but for TorchScript's, which cannot be changed."""
    return (module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule))


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """With their names; those that it has in several places are there several times."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


@contextmanager
def observed(network: nn.Module) -> Iterator[None]:
    """While `network` runs: see whether it calls its sequences whole, and remember of which that is not so.

    Others than `nn.Sequential` may call the parts of one: all or some of them, in any order, or also besides the whole.
    Not seen are calls of a part's `forward` itself, nor, besides the whole, those of a part that has a place elsewhere
    too: they show when engines are tuned, where results are compared with those of the network as it was.
    """
    modules, calls = list(parts(network)), Counter[nn.Module]()

    def count(module: nn.Module, _given: object) -> None:
        calls[module] += 1

    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for sequence in _taken_apart(modules, calls):
        setattr(sequence, _APART, True)


def _taken_apart(modules: Sequence[nn.Module], calls: Counter[nn.Module]) -> list[nn.Module]:
    """The sequences among these that were not called, or parts of which were called more often than they."""
    sequences = {module for module in modules if is_sequence(module)}
    # What has a place elsewhere too is called from there.
    elsewhere = {child for module in modules if module not in sequences for _, child in children(module)}
    expected = Counter[nn.Module]()
    for sequence in sequences:
        for _, child in children(sequence):
            expected[child] += calls[sequence]
    more = {child for child in expected if child not in elsewhere and calls[child] > expected[child]}
    return [one for one in sequences if not calls[one] or any(child in more for _, child in children(one))]


# Set on what `is_sequence` no longer counts as one; copies have it too.
_APART = "_stackseg_apart"


def weight_bytes(network: nn.Module) -> int:
    """Bytes of its parameters and buffers; tensors that share memory count once."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _with_weights(architecture: Architecture, spec: ModelSpec) -> nn.Module:
    network = build(architecture)
    try:
        state: dict[str, Any] = load_file(spec.weights_path)
        network.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        faults = _first_faults(error)
        raise BrokenModel(f"{spec.weights_path}: the weights do not fit {architecture.name}: {faults}") from error
    return network


def _first_faults(error: Exception) -> str:
    """The head of a message in which torch gives every tensor that differs a line of its own, below a headline."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(lines[:2]) + (f" (and {len(lines) - 2} more)" if len(lines) > 2 else "")


@torch.inference_mode()
def _check_shapes(network: nn.Module, spec: ModelSpec, first: Callable[[nn.Module, Tensor], Tensor]) -> None:
    shape = (1, spec.input.channels, *spec.input.roi_size)
    expected = (1, len(spec.outputs), *spec.input.roi_size)
    try:
        with observed(network):
            scores = first(network, torch.zeros(shape))
    except (RuntimeError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError) as error:
        raise BrokenModel(f"{spec.folder}: the network does not take a window of shape {shape}: {error}") from error
    if tuple(scores.shape) != expected:
        raise BrokenModel(f"{spec.folder}: the network returned {tuple(scores.shape)} where {expected} was expected.")
