"""Decoders that convert scores to the class with the highest score, or to objects.

A decoder receives finished slabs and retains only the data that it needs, so the scores of a whole volume are never
held in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.buffers import LARGE_ARRAY_BYTES, Allocator, release_pages
from service.core.quantities import Size, VoxelSize
from service.core.types import CancellationCheck, OutputKind, Segmentation, never_cancelled
from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.pieces import logit
from service.inference.decoding.streaming import compute_foreground_mask, select_foreground_logits
from service.inference.decoding.watershed import NEIGHBOR_BATCH_VOXELS
from service.inference.decoding.watershed_kernel import CPU, choose_block_planes, watershed_kernel
from service.models.spec import ModelSpec
from service.models.spec_parts import Boundaries, Classes, Flows, Instances, Regions, StarConvex

# Number of voxels whose scores fit in the cache of a core.
CACHE_VOXELS = 2**16
# Peak memory per voxel of the decoder of boundaries, by measurement.
BOUNDARY_BYTES_PER_VOXEL = 72
# Estimated bytes per voxel of the decoder of flows: 16 for scores, 24 for labels and for the numbers of voxels that end
# at each place, and 64 for the positions and labels of each foreground voxel, of which there is at most one in two.
FLOW_BYTES_PER_VOXEL = 72
# Fraction of the scores of a dense tissue that are candidates for polyhedra, for the estimate of the memory. They are
# near the centers of objects: half of the radius is an eighth of the volume.
CANDIDATE_FRACTION = 1 / 16
# Memory of the child process that renders polyhedra, with NumPy and SciPy but without arrays.
CHILD_PROCESS_BYTES = 100 * 2**20


class Decoder(Protocol):
    """Converts slabs of raw scores to a segmentation."""

    def add(self, z0: int, y0: int, scores: Tensor, /) -> None:
        """Add raw scores [1, K, z, y, X] of the planes from `z0` and the rows from `y0`.

        The scores are float32 on any device, or bfloat16 on a CPU. Slabs arrive without gaps: all rows of some planes
        in order, then all rows of the next planes.
        """

    def finish(self) -> Segmentation:
        """Return the segmentation [Z, Y, X] or [K, Z, Y, X] after all planes have been added."""


def make_decoder(  # noqa: PLR0913
    spec: ModelSpec,
    size: Size,
    output: OutputKind,
    voxel_size: VoxelSize | None,
    allocate: Allocator = np.zeros,
    *,
    cancelled: CancellationCheck = never_cancelled,
    threads: int = 1,
) -> Decoder:
    """Return the decoder for an output of this model.

    size       (Z, Y, X) of the volume
    allocate   creates the result array
    cancelled  returns whether the request was canceled; called if decoding the last slab takes long
    threads    maximum number of threads that detect objects on the CPU
    """
    decoding, num_outputs = spec.decoding, len(spec.outputs)
    if output == "labels" and isinstance(decoding, Instances):
        return InstanceDecoder(spec, decoding, size, voxel_size, threads=threads)
    if output == "labels" and isinstance(decoding, Boundaries | StarConvex | Flows):
        return _make_optional_decoder(spec, size, voxel_size, cancelled)
    if output == "probabilities":
        names = spec.probability_outputs
        segmentation = Segmentation(allocate((len(names), *size), np.float32), output, voxel_size, names=names)
        return VoxelDecoder(segmentation, partial(_compute_probabilities, spec), spec.tiling.step)
    convert: Callable[[Tensor], Tensor]
    if isinstance(decoding, Regions):
        pixels, convert = allocate(size, np.uint8), partial(_paint_regions, spec, decoding)
    elif not isinstance(decoding, Classes):
        pixels, convert = allocate(size, np.uint8), partial(_find_foreground, spec, decoding)
    else:
        pixels, convert = allocate(size, np.uint8 if num_outputs <= 256 else np.uint16), _find_highest_class
    return VoxelDecoder(Segmentation(pixels, "classes", voxel_size, names=spec.class_names), convert, spec.tiling.step)


def _make_optional_decoder(
    spec: ModelSpec, size: Size, voxel_size: VoxelSize | None, cancelled: CancellationCheck
) -> Decoder:
    """Return a decoder whose module is rarely needed, and may need an optional library."""
    decoder: Decoder
    if isinstance(spec.decoding, StarConvex):
        module = import_module("service.inference.decoding.external.star_convex.decoder")
        decoder = module.StarConvexDecoder(spec, spec.decoding, size, voxel_size, cancelled)
    elif isinstance(spec.decoding, Flows):
        module = import_module("service.inference.decoding.external.flows.decoder")
        decoder = module.FlowDecoder(spec.decoding, size, voxel_size, cancelled)
    else:
        module = import_module("service.inference.decoding.external.boundaries")
        decoder = module.BoundaryDecoder(spec, spec.decoding, size, voxel_size)
    return decoder


class HostDecoder:
    """Decoder that copies scores to the host and passes them to the decoder that `create_decoder` creates."""

    def __init__(self, create_decoder: Callable[[], Decoder]) -> None:
        self._decoder = create_decoder()

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        self._decoder.add(z0, y0, scores.cpu())

    def finish(self) -> Segmentation:
        return self._decoder.finish()


class DecodingMemory(NamedTuple):
    """Peak memory in bytes of decoding and its result, on the host and on disk."""

    host_bytes: int
    disk_bytes: int = 0


def estimate_decoding_memory(spec: ModelSpec, output: OutputKind, size: Size) -> DecodingMemory:
    """Estimate the memory for decoding a volume of `size` (Z, Y, X) on the host."""
    voxels = math.prod(size)
    if output != "labels":
        # The result is collected on the host, even if the scores are on another device.
        result_bytes = voxels if output == "classes" else 4 * len(spec.probability_outputs) * voxels
        return (
            DecodingMemory(result_bytes)
            if result_bytes < LARGE_ARRAY_BYTES
            else DecodingMemory(0, disk_bytes=result_bytes)
        )
    if isinstance(spec.decoding, Boundaries):
        return DecodingMemory((BOUNDARY_BYTES_PER_VOXEL + 4 * len(spec.decoding.affinities)) * voxels)
    if isinstance(spec.decoding, Flows):
        return DecodingMemory(FLOW_BYTES_PER_VOXEL * voxels)
    if isinstance(spec.decoding, StarConvex):
        # A file that may be in memory contains the candidates, and the child process sorts a copy. The labels exist as
        # 32-bit integers and in their final type.
        candidate_bytes = (
            4 * (4 + spec.decoding.rays.count) * voxels * CANDIDATE_FRACTION // math.prod(spec.tiling.step)
        )
        return DecodingMemory(int(2 * candidate_bytes + CHILD_PROCESS_BYTES + (4 + 4) * voxels))
    if watershed_kernel.supports(CPU, size):
        # The kernel stores the key, the piece and the position of each voxel in a block. Each voxel of the volume has
        # a piece number, and a label of two bytes if there are up to 65535 objects. By measurement, pieces of dense
        # tissues and the passes between them use two to four bytes per voxel, or six if peaks are unclear.
        block_voxels = min(voxels, (choose_block_planes(size) + 2) * size[1] * size[2])
        return DecodingMemory(13 * block_voxels + (4 + 2 + 4) * voxels)
    # Each voxel also has a label, which is first a 32-bit integer.
    return DecodingMemory(estimate_watershed_bytes(size) + 4 * voxels)


def estimate_watershed_bytes(size: Size) -> int:
    """Estimate the memory in bytes for the watershed in PyTorch of a volume of `size` (Z, Y, X)."""
    # By measurement, about nine 32-bit arrays exist at the same time. Each voxel has a height, a mask, a code, a basin
    # and a label, and the passes between crowded objects need two more bytes per voxel. The last term is for the
    # neighbors of the voxels in one batch.
    padded_voxels = math.prod(length + 2 for length in size)
    return 36 * padded_voxels + (8 + 6) * math.prod(size) + 600 * NEIGHBOR_BATCH_VOXELS


def split_planes(z0: int, scores: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of the first plane and the scores [1, K, z, y, X] of each part of a slab.

    On a CPU, each part has only a few planes, so that temporary arrays stay in the cache. Larger arrays would fragment
    memory, because malloc rarely reuses freed memory for the aligned arrays of PyTorch.
    """
    num_planes = scores.shape[2]
    step = max(CACHE_VOXELS // max(math.prod(scores.shape[3:]), 1), 1) if scores.is_cpu else num_planes
    yield from zip(range(z0, z0 + num_planes, step), torch.split(scores, step, 2), strict=True)


def write_slab(pixels: NDArray[Any], z0: int, y0: int, slab: NDArray[Any]) -> None:
    """Copy `slab` [..., z, y, X] into `pixels` [..., Z, Y, X], and release the memory pages of arrays on disk."""
    num_planes, num_rows = slab.shape[-3:-1]
    pixels[..., z0 : z0 + num_planes, y0 : y0 + num_rows, :] = slab
    if y0 + num_rows == pixels.shape[-2]:
        release_pages(pixels)


class VoxelDecoder:
    """Decoder that converts each voxel independently and writes it into the pixels of a segmentation.

    convert  converts raw scores [1, K, z, y, X] to pixels [..., z, y, X]
    step     number of voxels along (z, y, x) that one score stands for
    """

    def __init__(self, segmentation: Segmentation, convert: Callable[[Tensor], Tensor], step: Size = (1, 1, 1)) -> None:
        self._segmentation, self._convert, self._step = segmentation, convert, step

    def add(self, z0: int, y0: int, scores: Tensor) -> None:
        pixels = self._segmentation.pixels
        for first, part in split_planes(z0, scores):
            slab, z, y = self._convert(part).cpu().numpy(), first * self._step[0], y0 * self._step[1]
            for axis, factor in enumerate(self._step, -3):
                slab = slab.repeat(factor, axis) if factor > 1 else slab
            write_slab(pixels, z, y, slab[..., : pixels.shape[-3] - z, : pixels.shape[-2] - y, : pixels.shape[-1]])

    def finish(self) -> Segmentation:
        return self._segmentation


def _compute_probabilities(spec: ModelSpec, scores: Tensor) -> Tensor:
    """Return the activated outputs that are probabilities, float32 [K, z, y, X]."""
    return _activate(spec, scores)[: len(spec.probability_outputs)]


def _activate(spec: ModelSpec, scores: Tensor) -> Tensor:
    """Return the activated outputs, float32 [K, z, y, X]."""
    scores = scores[0].float()
    match spec.activation:
        case "sigmoid":
            return torch.sigmoid(scores)
        case "softmax":
            return torch.softmax(scores, dim=0)
        case "none":
            return scores
    is_logit = torch.tensor([spec.get_activation(name) == "sigmoid" for name in spec.outputs], device=scores.device)
    return torch.where(is_logit[:, None, None, None], torch.sigmoid(scores), scores)


def _find_highest_class(scores: Tensor) -> Tensor:
    """Return the index of the highest score, int64 [z, y, X]."""
    # Equivalent to argmax, which takes nine times as long along the first axis.
    return scores[0].max(0).indices


def _paint_regions(spec: ModelSpec, decoding: Regions, scores: Tensor) -> Tensor:
    """Return the class of the last region that contains each voxel, uint8 [z, y, X]; 0 if there is none."""
    regions = _activate(spec, scores) > decoding.threshold
    classes = torch.zeros(regions.shape[1:], dtype=torch.uint8, device=scores.device)
    for region, value in zip(regions, decoding.classes, strict=True):
        classes.masked_fill_(region, value)
    return classes


def _find_foreground(spec: ModelSpec, decoding: Instances | Boundaries | StarConvex | Flows, scores: Tensor) -> Tensor:
    """Return the mask of the foreground, of the boundaries, or of possible origins of polyhedra, bool [z, y, X]."""
    if isinstance(decoding, StarConvex | Flows):
        return _activate(spec, scores)[0] > decoding.threshold
    if isinstance(decoding, Boundaries):
        return _activate(spec, scores)[spec.outputs.index(decoding.boundary)] > decoding.watershed_threshold
    return compute_foreground_mask(select_foreground_logits(spec, decoding, scores[0]), logit(decoding.threshold))
