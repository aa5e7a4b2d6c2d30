"""Decoding of tiles: their windows are blended, and converted to classes or to pieces of the watershed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.telemetry import Stages
from service.core.types import Array
from service.formats.npy_nifti import pack, unpack
from service.inference.blockwise.layout import Box, firsts, lengths, slices
from service.inference.blockwise.window_scores import GroupScores, window_positions
from service.inference.decoding.basin_merging import Persistence
from service.inference.decoding.block_kernel import Block, block_kernel
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.postprocessing import apply_postprocessing, require_instances
from service.inference.decoding.smoothing import Smoother
from service.inference.decoding.streaming import logit
from service.inference.decoding.watershed_kernel import WatershedParameters
from service.inference.preprocessing.resample import nearest_voxels
from service.inference.windows.blending import Blending, BlendingSetup, make_blender

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import BlockTask, OpenRun
    from service.models.spec import ModelSpec

# Number of planes of a tile that are compressed together. Writing the result reads parts of tiles.
SLAB_PLANES = 16


def decoding_spec(run: OpenRun) -> ModelSpec:
    """Return the model with the post-processing options of the run."""
    return apply_postprocessing(run.spec, run.plan.options.postprocessing, run.plan, run.plan.layout.size)


def decode_tile(
    run: OpenRun,
    task: BlockTask,
    blending: Blending,
    device: torch.device,
    stages: Stages,
) -> dict[str, Any]:
    """Decode a tile, and write the result; return facts for its record.

    For classes, the result is the tile, [Z, Y, X]. For labels, it is the pieces of the tile, with an archive:

    facts, passes  as in `BlockPieces`
    stack_voxels   number of voxels of the stack in each piece, int64 [P], if the stack was resampled
    at_faces       pieces that touch a face of the volume
    face-A-S       pieces of the voxels in the first (S = 0) or last (S = 1) layer along axis A
    """
    layout = run.plan.layout
    scores = GroupScores(run, layout.required_groups(task.number))
    if not scores:
        return {"empty": True}
    with stages.measure("blend"):
        blended = blend(run, task.number, scores, blending, device)
    spec, tile_pieces = decoding_spec(run), None
    with stages.measure("decode"):
        if run.plan.output == "classes":
            decoder = make_decoder(spec, lengths(layout.tile(task.number)), "classes", None)
            decoder.add(0, 0, blended[None])
            pixels: Array = decoder.finish().pixels
        else:
            tile_pieces = _find_pieces(run, task, spec, blended)
            pixels = tile_pieces.pixels
    with stages.measure("write"):
        facts = _write_pixels(run, task.number, pixels)
        if tile_pieces is not None:
            run.folder.write_arrays(f"tiles/{task.number}.npz", tile_pieces.arrays)
            facts["pieces"] = len(tile_pieces.arrays["facts"])
    return {"empty": False, **facts}


def _write_pixels(run: OpenRun, number: int, pixels: Array) -> dict[str, Any]:
    """Write the voxels of a tile in slabs; return their dtype and the end of each slab in the file."""
    ends = [0]
    with run.folder.open_for_writing(f"tiles/{number}.raw") as file:
        for first in range(0, len(pixels), SLAB_PLANES):
            ends.append(ends[-1] + file.write(pack(pixels[first : first + SLAB_PLANES])))
    return {"bytes": ends[-1], "ends": ends, "dtype": pixels.dtype.name}


def read_pixels(run: OpenRun, number: int, box: tuple[slice, slice, slice]) -> Array:
    """Read a part of the voxels of a tile that is not empty; `box` is relative to the tile."""
    facts, (depth, height, width) = run.folder.read_record("tile", number), lengths(run.plan.layout.tile(number))
    first, end, _ = box[0].indices(depth)
    numbers = range(first // SLAB_PLANES, -(-end // SLAB_PLANES))
    slabs = list[Array]()
    with (run.folder.path / f"tiles/{number}.raw").open("rb") as file:
        file.seek(facts["ends"][numbers.start])
        for index in numbers:
            planes = min(SLAB_PLANES, depth - index * SLAB_PLANES)
            data = file.read(facts["ends"][index + 1] - facts["ends"][index])
            slab = unpack(data, (planes, height, width), facts["dtype"])
            low = index * SLAB_PLANES
            slabs.append(slab[max(first - low, 0) : end - low, box[1], box[2]])
    return np.concatenate(slabs)


def blend(run: OpenRun, number: int, scores: GroupScores, blending: Blending, device: torch.device) -> Tensor:
    """Return the scores [K, z, y, x] of a tile and its margin, bitwise equal to those of the whole volume."""
    layout = run.plan.layout
    around = layout.surroundings(number)
    windows = layout.windows_over(around)
    grid = layout.subgrid(windows)
    origin = window_positions(layout, windows)[0]
    first = scores.read(origin)
    if layout.grid.count == 1:
        inside = tuple(slice(low, low + n) for low, n in zip(grid.pad_before, grid.size, strict=True))
        return first[(slice(None), *inside)]
    blender = make_blender(grid, len(first), BlendingSetup(blending, device))
    blended = torch.empty((len(first), *lengths(around)))
    for position, stored_position in zip(grid.positions(), window_positions(layout, windows), strict=True):
        for slab in blender.add([position], scores.read(stored_position).to(device)[None]):
            span = tuple((low, low + n) for low, n in zip((slab.z0, slab.y0, 0), slab.scores.shape[2:], strict=True))
            _paste(slab.scores[0].cpu(), _shift(span, origin), blended, around)
    return blended


def _shift(span: Any, origin: Any) -> Box:
    z, y, x = ((first + start, end + start) for (first, end), start in zip(span, origin, strict=True))
    return z, y, x


def _paste(part: Tensor, box: Box, whole: Tensor, around: Box) -> None:
    """Copy the intersection of two boxes from `part`, which covers `box`, to `whole`, which covers `around`."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, around, strict=True)]
    if all(first < end for first, end in common):
        z, y, x = common
        target, source = slices((z, y, x), firsts(around)), slices((z, y, x), firsts(box))
        whole[(slice(None), *target)] = part[(slice(None), *source)]


class _TilePieces(NamedTuple):
    """Pieces of a tile, [Z, Y, X], and the arrays that describe them."""

    pixels: Array
    arrays: dict[str, Array]


def _find_pieces(run: OpenRun, task: BlockTask, spec: ModelSpec, scores: Tensor) -> _TilePieces:
    decoding, layout = require_instances(spec), run.plan.layout
    tile, around = layout.tile(task.number), layout.surroundings(task.number)
    heights, inside = scores[spec.outputs.index(decoding.distance)], scores[spec.outputs.index(decoding.foreground)]
    if decoding.smoothing:
        smoother = Smoother(decoding.smoothing)
        heights = torch.cat([part for part, _ in (*smoother.add(heights.float(), inside), *smoother.finish())])
    z, y, x = ((max(first - 1, 0), min(end + 1, n)) for (first, end), n in zip(tile, layout.size, strict=True))
    with_margin = slices((z, y, x), firsts(around))
    persistence = Persistence(decoding.persistence, logits=spec.activation == "sigmoid")
    parameters = WatershedParameters(logit(decoding.threshold), persistence.depth, persistence.logits)
    block_pieces = block_kernel.trace(
        Block(lengths(tile), firsts(tile), layout.size), heights[with_margin], inside[with_margin], parameters
    )
    pixels: Array = block_pieces.pieces.astype(np.uint16 if len(block_pieces.facts) < 2**16 else np.uint32)
    arrays: dict[str, Array] = {"facts": block_pieces.facts, "passes": block_pieces.passes}
    if layout.size != run.plan.size:
        arrays["stack_voxels"] = _count_stack_voxels(pixels, len(block_pieces.facts), tile, layout.size, run.plan.size)
    arrays["at_faces"] = _at_faces(pixels, tile, layout.size)
    for axis, side in itertools.product(range(3), (0, 1)):
        arrays[f"face-{axis}-{side}"] = pixels.take([-side], axis).squeeze(axis)
    return _TilePieces(pixels, arrays)


def _count_stack_voxels(pixels: Array, pieces: int, tile: Box, size: Size, stack: Size) -> NDArray[np.int64]:
    """Return, for each piece, the number of voxels of the stack whose nearest voxel on the grid of `size` is in it."""
    z, y, x = (
        np.bincount(nearest, minlength=length)[slice(*span)]
        for nearest, length, span in zip(nearest_voxels(size, stack), size, tile, strict=True)
    )
    plane, counts = (y[:, None] * x).ravel(), np.zeros(pieces + 1, np.int64)
    for repeats, plane_pieces in zip(z.tolist(), pixels, strict=True):
        # These sums are small integers, so they are exact.
        counts += repeats * np.bincount(plane_pieces.ravel(), plane, pieces + 1).astype(np.int64)
    return counts[1:]


def _at_faces(pieces: Array, tile: Box, size: tuple[int, int, int]) -> Array:
    """Return the pieces that touch a face of the volume. Axes with a single voxel do not count."""
    faces = [np.zeros(0, pieces.dtype)]
    for axis, ((first, end), length) in enumerate(zip(tile, size, strict=True)):
        if length > 1:
            faces += [pieces.take(0, axis).ravel()] * (first == 0) + [pieces.take(-1, axis).ravel()] * (end == length)
    at_faces = np.unique(np.concatenate(faces))
    return at_faces[at_faces > 0]
