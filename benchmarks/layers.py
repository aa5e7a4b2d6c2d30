"""How fast single layers run where channels are last: norms with their activation, and the model's convolutions.

python benchmarks/layers.py [--model models/nuclei] [--threads 1] [--windows 2] [--groups 8] [--calls 10]

Norms work on as many channels of a whole window as are named: ATen's own, and those of `service/engine/norms.py`, eager
and compiled, and how far their largest result is from float64's where the mean is five standard deviations. The
convolutions are those of the model for which there is a Winograd kernel, on the shapes that they have in it, beside
oneDNN's. Milliseconds of a call are the least of all, of one thread's CPU time where there is one thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from network import ROOT, least, matrix_peak, trusted
from torch import Tensor, nn

from service import hardware
from service.engine import compiled, norms, winograd
from service.engine.prepare import prepare
from service.networks import load
from service.repository import ModelSpec, read_spec

LAST = torch.channels_last_3d


def norm_rows(x: Tensor, groups: int) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """What each is called, itself, and what it should give."""
    channels = x.shape[1]
    for norm in (nn.InstanceNorm3d(channels, affine=True), nn.GroupNorm(groups, channels)):
        own = nn.Sequential(norm, nn.ReLU())
        exact = copy.deepcopy(own).double()(x.double())
        for whose, module in (("ATen's", own), ("channels-last", norms.lay_out(copy.deepcopy(own)))):
            yield f"{whose} {type(norm).__name__}, eager", module, exact
            yield f"{whose} {type(norm).__name__}, compiled", _Compiled(module), exact


class _Compiled(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._run = compiled.make(module, "default", freeze=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


def convolutions(spec: ModelSpec, windows: int) -> list[tuple[nn.Conv3d, Tensor]]:
    """The convolutions with a kernel of ours, each with an input as it has in the network; of equals one."""
    network = prepare(load(spec), torch.device("cpu"), torch.float32, LAST)
    found = dict[tuple[int, ...], tuple[nn.Conv3d, Tensor]]()

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if winograd.suits(module):
            found.setdefault((module.out_channels, *inputs[0].shape), (module, inputs[0].clone()))

    handles = [module.register_forward_pre_hook(note) for module in network.modules()]
    network(torch.rand(windows, spec.input.channels, *spec.input.roi_size).to(memory_format=LAST))
    for handle in handles:
        handle.remove()
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = torch.device("cpu")
    spec = read_spec(options.model)
    x = torch.randn(options.windows, options.channels, *spec.input.roi_size).add_(5).to(memory_format=LAST)
    print(f"{hardware.device_name(cpu)}, {options.threads} threads, torch {torch.__version__}")
    print(f"\n| norm and ReLU over {' x '.join(map(str, x.shape))} | ms | largest error |\n|---|---|---|")
    with torch.inference_mode():
        for name, module, exact in norm_rows(x, options.groups):
            error = (module(x) - exact).abs().max().item()
            timing = least(lambda run=module: run(x), options.calls, cpu)
            print(f"| {name} | {trusted(timing, cpu) * 1000:.0f} | {error:.0e} |", flush=True)
        print("\n| convolution | oneDNN, ms | Winograd, ms | ratio | share of a matrix product's speed |")
        print("|---|---|---|---|---|")
        for convolution, image in convolutions(spec, options.windows):
            ours = winograd.Convolution(convolution)
            before, after = (
                trusted(least(lambda run=run, x=image: run(x), options.calls, cpu), cpu) for run in (convolution, ours)
            )
            peak = matrix_peak(torch.float32, options.calls, cpu)
            flop = 2 * 27 * convolution.out_channels * image.numel()
            shape = f"{convolution.in_channels} to {convolution.out_channels}, {' x '.join(map(str, image.shape[2:]))}"
            print(f"| {shape} | {before * 1000:.1f} | {after * 1000:.1f} | {before / after:.2f} ", end="")
            print(f"| {flop / after / peak:.0%} |", flush=True)


if __name__ == "__main__":
    main()
