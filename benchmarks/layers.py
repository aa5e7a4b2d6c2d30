"""How fast single layers run where channels are last: norms with their activation, and the model's convolutions.

python benchmarks/layers.py [--model models/nuclei] [--threads 1] [--windows 2] [--groups 8] [--calls 10]
                            [--layer 256 256 4] [--only "32 to 32"] [--kernels FOLDER]

Norms work on as many channels of a whole window as are named: ATen's own, and those of `service/engine/norms.py`, eager
and compiled, in float32 and bfloat16, and how far their largest result is from float64's where the mean is five
standard deviations. The convolutions are those of the model for which there is a kernel of ours, Winograd's or that of
`service/engine/patches.py`, on the shapes that they have in it, beside oneDNN's with weights in its own layout.
Milliseconds of a call are the least of all, of one thread's CPU time where there is one thread.

With --layer, convolutions of so many inputs and outputs, and voxels along each edge, instead of the model's. With
--only, rows whose name contains the text. With --kernels, compiled kernels stay in FOLDER, where `perf report` finds
the names of their parts: perf record python benchmarks/layers.py --only "32 to 32" --kernels FOLDER
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from network import ROOT, least, matrix_peak, trusted
from torch import Tensor, nn

from service.core import hardware
from service.core.cpp_extension import shelf
from service.engine import compiled, norms, packed, patches, winograd
from service.engine.prepare import prepare
from service.models.loader import load
from service.models.repository import ModelSpec, read_spec

LAST = torch.channels_last_3d
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def norm_rows(image: Tensor, groups: int) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """What each is called, itself, what it takes and what it should give."""
    channels = image.shape[1]
    for norm, dtype in itertools.product(
        (nn.InstanceNorm3d(channels, affine=True), nn.GroupNorm(groups, channels)), DTYPES
    ):
        x, own = image.to(dtype), nn.Sequential(norm, nn.ReLU()).to(dtype)
        exact = copy.deepcopy(own).double()(x.double())
        for whose, module in (("ATen's", own), ("channels-last", norms.lay_out(copy.deepcopy(own)))):
            name = f"{whose} {type(norm).__name__}, {DTYPES[dtype]}"
            yield f"{name}, eager", module, x, exact
            yield f"{name}, compiled", _Compiled(module), x, exact


class _Compiled(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._run = compiled.make(module, "default", freeze=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


def convolutions(spec: ModelSpec, windows: int) -> list[tuple[packed.Layer, Tensor]]:
    """The convolutions with a kernel of ours, each with an input as it has in the network; of equals one."""
    network = prepare(load(spec), torch.device("cpu"), torch.float32, LAST)
    found = dict[tuple[object, ...], tuple[packed.Layer, Tensor]]()

    def note(module: packed.Layer, inputs: tuple[Tensor, ...]) -> None:
        place = (type(module), module.out_channels, module.kernel_size, *inputs[0].shape)
        found.setdefault(place, (module, inputs[0].clone()))

    # With a hook a module is an ordinary one no longer.
    known = [module for module in network.modules() if winograd.suits(module) or patches.suits(module)]
    handles = [module.register_forward_pre_hook(note) for module in known]
    network(torch.rand(windows, spec.input.channels, *spec.input.roi_size).to(memory_format=LAST))
    for handle in handles:
        handle.remove()
    return list(found.values())


def stated(layers: list[list[int]], windows: int) -> Iterator[tuple[packed.Layer, Tensor]]:
    """Convolutions of so many inputs, outputs and voxels along each edge, and what they take."""
    for inputs, outputs, edge in layers:
        layer = nn.Conv3d(inputs, outputs, 3, padding=1).requires_grad_(requires_grad=False)
        yield layer, torch.randn(windows, inputs, edge, edge, edge).to(memory_format=LAST)


def convolution_rows(found: Iterable[tuple[packed.Layer, Tensor]]) -> Iterator[tuple[str, packed.Layer, Tensor]]:
    """What each is called, itself, and what it takes."""
    for convolution, image in found:
        kernel = "x".join(map(str, convolution.kernel_size))
        kernel += " transposed" if isinstance(convolution, nn.ConvTranspose3d) else ""
        channels = f"{convolution.in_channels} to {convolution.out_channels}, {kernel}"
        for dtype, name in DTYPES.items():
            shape = " x ".join(map(str, image.shape[2:]))
            yield f"{channels}, of {shape}, {name}", copy.deepcopy(convolution).to(dtype), image.to(dtype)


def ours(convolution: packed.Layer) -> nn.Module:
    """The kernel for it."""
    return winograd.Convolution(convolution) if winograd.suits(convolution) else patches.Convolution(convolution)


def flop(convolution: packed.Layer, x: Tensor) -> float:
    """Operations that `convolution` takes for `x`, each product counted."""
    positions = x.numel() / convolution.in_channels
    if not isinstance(convolution, nn.ConvTranspose3d):
        positions /= math.prod(convolution.stride)
    return 2 * convolution.weight.numel() * positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--layer", type=int, nargs=3, action="append", metavar=("INPUTS", "OUTPUTS", "EDGE"))
    parser.add_argument("--only", default="")
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.kernels is not None:
        shelf.use(options.kernels)
    cpu = torch.device("cpu")
    spec = read_spec(options.model)
    print(f"{hardware.device_name(cpu)}, {options.threads} threads, torch {torch.__version__}")
    with torch.inference_mode():
        print_norms(spec, options)
        print_convolutions(spec, options)


def milliseconds(module: nn.Module, x: Tensor, calls: int) -> float:
    cpu = torch.device("cpu")
    return trusted(least(lambda: module(x), calls, cpu), cpu) * 1000


def print_norms(spec: ModelSpec, options: argparse.Namespace) -> None:
    image = torch.randn(options.windows, options.channels, *spec.input.roi_size).add_(5).to(memory_format=LAST)
    print(f"\n| norm and ReLU over {' x '.join(map(str, image.shape))} | ms | largest error |\n|---|---|---|")
    for name, module, x, exact in norm_rows(image, options.groups):
        if options.only in name:
            error = (module(x) - exact).abs().max().item()
            print(f"| {name} | {milliseconds(module, x, options.calls):.1f} | {error:.0e} |", flush=True)


def print_convolutions(spec: ModelSpec, options: argparse.Namespace) -> None:
    print("\n| convolution | oneDNN, ms | ours, ms | ratio | share of a matrix product's speed |")
    print("|---|---|---|---|---|")
    found = stated(options.layer, options.windows) if options.layer else convolutions(spec, options.windows)
    for name, convolution, x in convolution_rows(found):
        if options.only not in name:
            continue
        direct = packed.Convolution(convolution, packed.Activation())
        before, after = (milliseconds(module, x, options.calls) for module in (direct, ours(convolution)))
        peak = matrix_peak(x.dtype, options.calls, torch.device("cpu"))
        print(f"| {name} | {before:.2f} | {after:.2f} | {before / after:.2f} ", end="")
        print(f"| {flop(convolution, x) / after / peak * 1000:.0%} |", flush=True)


if __name__ == "__main__":
    main()
