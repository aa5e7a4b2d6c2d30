"""Estimation of the number of windows and the memory that a volume needs, from its shape and the activation size."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn

from service.core.quantities import Size
from service.core.types import Extent
from service.inference.cuda.device_image import buffer_bytes, image_bytes, uploaded_bytes
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
    """Load of computing windows: bytes per window, number of concurrent batches, and whether they use host memory."""

    window_bytes: int
    streams: int = 1
    on_host: bool = True


def estimate(
    spec: ModelSpec, volume: Extent, plan: Plan, load: WindowLoad, kernel: WindowKernels = window_kernels
) -> Estimate:
    """Estimate windows and memory for a volume of this shape and voxel size. `kernel` blends on the CPU."""
    size, stored, channels = working_size(volume, spec, plan.diameter), as_size(volume.shape[1:]), spec.input.channels
    grid = Grid.cover(size, spec.input.roi_size, plan.overlap)
    source = _count_source_voxels(grid, stored)
    concurrent = min(load.streams, -(-grid.count // plan.sw_batch_size)) * plan.sw_batch_size
    decoding, decoding_on_device = estimate_decoding(spec, plan.output, size), 0
    if plan.output == "labels" and not (load.on_host or plan.decode_on_host):
        # The host receives the labels, and the piece numbers that map to them.
        decoding, decoding_on_device = DecodingMemory(8 * math.prod(size)), watershed_bytes(size)
    # If the result is stored on disk, the planes from which a layer of windows is cut are in memory.
    host, device = decoding.host, 0
    if decoding.disk:
        host += 4 * volume.shape[0] * math.prod(volume.shape[2:]) * source[0]
    blender_floats = count_buffered_floats(grid, len(spec.outputs), by_kernel=load.on_host and kernel.supports(CPU))
    if load.on_host:
        if size != stored:
            # Each stream normalizes the pixels of a window as it reads them, and interpolates one axis after another,
            # which takes two buffers.
            reading = min(load.streams, grid.count)
            host += 4 * channels * reading * (2 * math.prod(source) + 3 * math.prod(grid.roi))
        host += 4 * (blender_floats + _slab_floats(spec, grid, plan, concurrent)) + concurrent * load.window_bytes
    else:
        host += 2 * buffer_bytes(size) + (4 * channels * math.prod(size) if size != stored else 0)
        # Slabs of three batches may exist at a time: of two launched ones, and of one that is being delivered.
        waiting = min(3 * concurrent, grid.count)
        running = 4 * (blender_floats + _slab_floats(spec, grid, plan, waiting)) + concurrent * load.window_bytes
        device = decoding_on_device + running + uploaded_bytes(volume.shape) + image_bytes(channels, size, grid.roi[0])
    return Estimate(grid.count * plan.num_views, plan.sw_batch_size, plan.overlap, size, host, device)


def _count_source_voxels(grid: Grid, stored: Size) -> list[int]:
    """Return the number of voxels of the volume along each axis from which one window is interpolated."""
    axes = zip(grid.roi, stored, grid.size, strict=True)
    return [min(-(-edge * n // new) + 2 * (n != new), n) for edge, n, new in axes]


def _slab_floats(spec: ModelSpec, grid: Grid, plan: Plan, concurrent: int) -> int:
    """Return the number of float32 values in slabs that exist concurrently while `concurrent` windows are computed."""
    # One slab is decoded while the slabs of the next batches wait.
    slabs = 2 + -(-concurrent // len(grid.starts[2]))
    if plan.skip_below is not None:
        # Skipped rows become final before each computed window, and after the last one.
        skipped = grid.max_skipped_rows(len(spec.outputs), plan.sw_batch_size)
        slabs += min(concurrent * (skipped + 1) + skipped, grid.rows)
    # Of the rows of slabs, only the last one is returned whole.
    (depth, height, _), (_, _, width) = grid.roi, grid.padded
    step = max((after - start for start, after in itertools.pairwise(grid.starts[1])), default=height)
    rows = height if grid.count == 1 else height + (slabs - 1) * step
    return len(spec.outputs) * depth * width * rows


def activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Measure the bytes of float32 activations for an input of `shape`; see `measure_activations`."""
    with torch.inference_mode():
        return measure_activations(network, torch.zeros(shape))[1]


def measure_activations(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the scores of `network` for `x`, and the bytes of its activations.

    The bytes are the sum of the five largest layer outputs, because about five of them exist at the same time.
    """
    sizes: list[int] = []

    def record_size(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * 4)

    leaves = [module for module in iter_modules(network) if not list(module.children())]
    hooks = [leaf.register_forward_hook(record_size) for leaf in leaves]
    try:
        scores: torch.Tensor = network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return scores, sum(sorted(sizes)[-5:]) if leaves else typical_activation_bytes(tuple(x.shape))


def typical_activation_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of `activation_bytes` for a typical network, with 32 channels at full resolution."""
    return 5 * 32 * 4 * math.prod((shape[0], *shape[2:]))
