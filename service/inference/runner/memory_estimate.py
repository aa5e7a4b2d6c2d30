"""Estimates of the number of windows and the memory of a request, from the volume's shape and activation sizes."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn

from service.core.quantities import Size
from service.core.types import Extent, OutputKind
from service.inference.cuda.device_image import count_buffer_bytes, count_image_bytes, count_uploaded_bytes
from service.inference.decoding.decoders import (
    DecodingMemory,
    estimate_decoding_memory,
    estimate_watershed_bytes,
)
from service.inference.decoding.watershed_kernel import CPU
from service.inference.preprocessing.resample import compute_working_size, count_score_bytes, resamples_scores
from service.inference.types import Plan, ResourceEstimate
from service.inference.windows.blending import count_buffered_floats
from service.inference.windows.grid import Grid, as_size, cover_planes
from service.inference.windows.kernels import WindowKernels, window_kernels
from service.models.network import iter_modules
from service.models.spec import ModelSpec
from service.models.spec_parts import Flows, Instances


class WindowMemory(NamedTuple):
    """Memory that running the network on windows needs.

    window_bytes      bytes that the network needs per window
    streams           number of concurrent batches
    uses_host_memory  whether the windows are in the host's memory
    """

    window_bytes: int
    streams: int = 1
    uses_host_memory: bool = True


def estimate_request(
    spec: ModelSpec, volume: Extent, plan: Plan, memory: WindowMemory, kernels: WindowKernels = window_kernels
) -> ResourceEstimate:
    """Estimate the number of windows and the memory requirements for a volume of this shape and voxel size.

    kernels  C++ kernels that blend windows on the CPU, if they are available
    """
    if isinstance(spec.decoding, Flows):
        return _estimate_planes(spec, volume, plan, memory)
    return _estimate_windows(spec, volume, plan, memory, kernels)


def _estimate_windows(
    spec: ModelSpec, volume: Extent, plan: Plan, memory: WindowMemory, kernels: WindowKernels
) -> ResourceEstimate:
    """Estimate the requirements of a network that is applied to windows of the volume."""
    size, stored_size = compute_working_size(volume, spec, plan.diameter), as_size(volume.shape[1:])
    channels = spec.input.channels
    grid = Grid.cover(size, spec.input.roi_size, plan.overlap, spec.tiling)
    score_grid, source_shape = grid.divide(spec.tiling.step), _count_source_voxels(grid, stored_size)
    num_active_windows = min(memory.streams, -(-grid.num_windows // plan.sw_batch_size)) * plan.sw_batch_size
    decoding_memory, device_decoding_bytes = _estimate_decoding_memory(spec, plan.output, size, stored_size), 0
    if _decodes_on_device(spec, plan, memory):
        # For each voxel, the host receives the number of its basin, and converts it to a label.
        decoding_memory, device_decoding_bytes = DecodingMemory(8 * math.prod(size)), estimate_watershed_bytes(size)
    # If the result is stored on disk, the planes from which a layer of windows is cut are still held in memory.
    host_bytes, device_bytes = decoding_memory.host_bytes, 0
    if decoding_memory.disk_bytes:
        host_bytes += 4 * volume.shape[0] * math.prod(volume.shape[2:]) * source_shape[0]
    uses_kernel = memory.uses_host_memory and kernels.supports(CPU)
    num_floats = count_buffered_floats(score_grid, len(spec.outputs), uses_kernel=uses_kernel)
    if memory.uses_host_memory:
        if size != stored_size:
            # Each stream normalizes the pixels of a window when it reads them, and interpolates one axis after another,
            # which takes two buffers.
            num_readers = min(memory.streams, grid.num_windows)
            host_bytes += 4 * channels * num_readers * (2 * math.prod(source_shape) + 3 * math.prod(grid.window_size))
        host_bytes += (
            4 * (num_floats + _count_slab_floats(spec, score_grid, plan, num_active_windows))
            + num_active_windows * memory.window_bytes
        )
    else:
        host_bytes += 2 * count_buffer_bytes(size) + (4 * channels * math.prod(size) if size != stored_size else 0)
        # Slabs of three batches may exist at the same time: two launched batches, and one that is being delivered.
        num_waiting_windows = min(3 * num_active_windows, grid.num_windows)
        running_bytes = (
            4 * (num_floats + _count_slab_floats(spec, score_grid, plan, num_waiting_windows))
            + num_active_windows * memory.window_bytes
        )
        device_bytes = (
            device_decoding_bytes
            + running_bytes
            + count_uploaded_bytes(volume.shape)
            + count_image_bytes(channels, size, grid.window_size[0])
        )
    return ResourceEstimate(
        grid.num_windows * plan.num_views, plan.sw_batch_size, plan.overlap, size, host_bytes, device_bytes
    )


def _estimate_planes(spec: ModelSpec, volume: Extent, plan: Plan, memory: WindowMemory) -> ResourceEstimate:
    """Estimate the memory for a network that is applied to the planes of three orientations.

    The host holds the sum of the scores of all orientations. The prepared image is in the memory of the device.
    """
    size, stored_size = compute_working_size(volume, spec, plan.diameter), as_size(volume.shape[1:])
    image_bytes, score_bytes = (4 * count * math.prod(size) for count in (spec.input.channels, len(spec.outputs)))
    host_bytes = _estimate_decoding_memory(spec, plan.output, size, stored_size).host_bytes + score_bytes + image_bytes
    grids, running_bytes = cover_planes(size, spec.input.roi_size, plan.overlap, spec.tiling), 0
    for grid in grids:
        num_active_windows = min(memory.streams, -(-grid.num_windows // plan.sw_batch_size)) * plan.sw_batch_size
        num_floats = count_buffered_floats(grid, len(spec.outputs), uses_kernel=False)
        num_floats += _count_slab_floats(spec, grid, plan, num_active_windows)
        running_bytes = max(running_bytes, 4 * num_floats + num_active_windows * memory.window_bytes)
    device_bytes = 0 if memory.uses_host_memory else image_bytes + running_bytes
    host_bytes += running_bytes if memory.uses_host_memory else 0
    num_windows = sum(grid.num_windows for grid in grids)
    return ResourceEstimate(num_windows, plan.sw_batch_size, plan.overlap, size, host_bytes, device_bytes)


def _estimate_decoding_memory(spec: ModelSpec, output: OutputKind, size: Size, stored_size: Size) -> DecodingMemory:
    """Estimate the memory for decoding scores of a grid of `size` (Z, Y, X) for a stack of `stored_size`."""
    if size == stored_size or not resamples_scores(spec, output):
        return estimate_decoding_memory(spec, output, size)
    host_bytes, disk_bytes = estimate_decoding_memory(spec, output, stored_size)
    return DecodingMemory(host_bytes + count_score_bytes(spec, size, stored_size), disk_bytes)


def _decodes_on_device(spec: ModelSpec, plan: Plan, memory: WindowMemory) -> bool:
    """Return whether objects are decoded in device memory. Only instances are."""
    is_on_device = not (memory.uses_host_memory or plan.decode_on_host)
    return is_on_device and plan.output == "labels" and isinstance(spec.decoding, Instances)


def _count_source_voxels(grid: Grid, stored_size: Size) -> list[int]:
    """Return, for each axis, the number of voxels of the volume from which one window is interpolated."""
    axes = zip(grid.window_size, stored_size, grid.size, strict=True)
    return [
        min(-(-window_length * stored_length // working_length) + 2 * (stored_length != working_length), stored_length)
        for window_length, stored_length, working_length in axes
    ]


def _count_slab_floats(spec: ModelSpec, grid: Grid, plan: Plan, num_active_windows: int) -> int:
    """Return the number of float32 values in all slabs that exist while `num_active_windows` windows are computed."""
    # One slab is being decoded while the slabs of the next batches wait.
    num_slabs = 2 + -(-num_active_windows // len(grid.starts[2]))
    if plan.skip_below is not None:
        # Skipped rows become final before each computed window, and after the last one.
        num_skipped = grid.compute_max_skipped_rows(len(spec.outputs), plan.sw_batch_size)
        num_slabs += min(num_active_windows * (num_skipped + 1) + num_skipped, grid.num_rows)
    # All slabs are one step high, except for the last one, which is as high as a window.
    (depth, height, _), (_, _, width) = grid.window_size, grid.padded_size
    step = max((next_start - start for start, next_start in itertools.pairwise(grid.starts[1])), default=height)
    num_rows = height if grid.num_windows == 1 else height + (num_slabs - 1) * step
    return len(spec.outputs) * depth * width * num_rows


def measure_activation_bytes(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes of float32 activations for an input of `shape`, as measured by `measure_activations`."""
    with torch.inference_mode():
        return measure_activations(network, torch.zeros(shape))[1]


def measure_activations(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the scores of `network` for `x`, and the bytes of its activations in float32.

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
    return scores, sum(sorted(sizes)[-5:]) if leaves else estimate_activation_bytes(tuple(x.shape))


def estimate_activation_bytes(shape: tuple[int, ...]) -> int:
    """Return the number of bytes of activations in a typical network, which has 32 channels at full resolution."""
    return 5 * 32 * 4 * math.prod((shape[0], *shape[2:]))
