"""Windows and memory that segmenting a volume takes, by its shape and by the activations of the network."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn

from service.core.quantities import Size
from service.core.types import Extent
from service.inference.cuda.device_image import buffer_bytes, image_bytes, sent_bytes
from service.inference.cuda.watershed import watershed_bytes
from service.inference.decoding.decoders import DecodingMemory, estimate_decoding
from service.inference.decoding.watershed_kernel import CPU
from service.inference.preprocessing.resample import working_size
from service.inference.types import Estimate, Plan
from service.inference.windows.blending import count_buffered_floats
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.kernels import WindowKernels, window_kernels
from service.models.network import iter_modules
from service.models.spec import ModelSpec


class WindowLoad(NamedTuple):
    """How a network computes windows: bytes for one, batches at the same time, and whether in the host's memory."""

    window_bytes: int
    streams: int = 1
    on_host: bool = True


def estimate(
    spec: ModelSpec, volume: Extent, plan: Plan, load: WindowLoad, kernel: WindowKernels = window_kernels
) -> Estimate:
    """Estimate windows and memory for a volume of this shape and voxel size; `kernel` blends windows if it suits."""
    size, stored, channels = working_size(volume, spec, plan.diameter), as_size(volume.shape[1:]), spec.input.channels
    grid = Grid.cover(size, spec.input.roi_size, plan.overlap)
    under = _count_voxels_under(grid, stored)
    at_once = min(load.streams, -(-grid.count // plan.sw_batch_size)) * plan.sw_batch_size
    decoding, decoding_on_device = estimate_decoding(spec, plan.output, size), 0
    if plan.output == "labels" and not (load.on_host or plan.decode_on_host):
        # The host receives the labels and the numbers of pieces that they are looked up by.
        decoding, decoding_on_device = DecodingMemory(8 * math.prod(size)), watershed_bytes(size)
    # Where the result lies on disk, the planes that a layer of windows is cut from are in memory.
    host, device = decoding.host, 0
    if decoding.disk:
        host += 4 * volume.shape[0] * math.prod(volume.shape[2:]) * under[0]
    kept = count_buffered_floats(grid, len(spec.outputs), by_kernel=load.on_host and kernel.supports(CPU))
    if load.on_host:
        if size != stored:
            # Where a window reads them, pixels are normalised, and interpolated between two copies along one axis after
            # the other.
            reading = min(load.streams, grid.count)
            host += 4 * channels * reading * (2 * math.prod(under) + 3 * math.prod(grid.roi))
        host += 4 * (kept + _slab_floats(spec, grid, plan, at_once)) + at_once * load.window_bytes
    else:
        host += 2 * buffer_bytes(size) + (4 * channels * math.prod(size) if size != stored else 0)
        # Slabs of three batches may wait: of two that were launched, and one that is handed over.
        waiting = min(3 * at_once, grid.count)
        running = 4 * (kept + _slab_floats(spec, grid, plan, waiting)) + at_once * load.window_bytes
        device = decoding_on_device + running + sent_bytes(volume.shape) + image_bytes(channels, size, grid.roi[0])
    return Estimate(grid.count * plan.scorings, plan.sw_batch_size, plan.overlap, size, host, device)


def _count_voxels_under(grid: Grid, stored: Size) -> list[int]:
    """Return the voxels of the volume that one window is made of, along each axis."""
    axes = zip(grid.roi, stored, grid.size, strict=True)
    return [min(-(-edge * n // new) + 2 * (n != new), n) for edge, n, new in axes]


def _slab_floats(spec: ModelSpec, grid: Grid, plan: Plan, at_once: int) -> int:
    """Return the float32 numbers in slabs of finished scores that exist at a time, with `at_once` windows computed."""
    # One slab is decoded while those of the next batches wait.
    slabs = 2 + -(-at_once // len(grid.starts[2]))
    if plan.skip_below is not None:
        # Skipped rows finish before each window that is computed, and behind the last.
        skipped = grid.max_skipped_rows(len(spec.outputs), plan.sw_batch_size)
        slabs += min(at_once * (skipped + 1) + skipped, grid.rows)
    # Of the rows of slabs only the last leaves as a whole.
    (depth, height, _), (_, _, width) = grid.roi, grid.padded
    step = max((after - start for start, after in itertools.pairwise(grid.starts[1])), default=height)
    rows = height if grid.count == 1 else height + (slabs - 1) * step
    return len(spec.outputs) * depth * width * rows


def activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Measure the bytes of float32 activations for one input of `shape`; see `measure_activations`."""
    with torch.inference_mode():
        return measure_activations(network, torch.zeros(shape))[1]


def measure_activations(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the scores of `network` for `x`, and the bytes of its activations: the sum of its five largest.

    About five of the largest outputs of layers live at once.
    """
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * 4)

    leaves = [module for module in iter_modules(network) if not list(module.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        scores: torch.Tensor = network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return scores, sum(sorted(sizes)[-5:]) if leaves else typical_activation_bytes(tuple(x.shape))


def typical_activation_bytes(shape: tuple[int, ...]) -> int:
    """Return what `activation_bytes` gives for a typical network, with 32 channels at full resolution."""
    return 5 * 32 * 4 * math.prod((shape[0], *shape[2:]))
