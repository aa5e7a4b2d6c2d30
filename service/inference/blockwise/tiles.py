"""Decode tiles: blend the scores of a tile, and convert them to classes or to watershed pieces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.core.telemetry import Stages
from service.core.types import Array
from service.formats.npy_nifti_writer import compress_array, decompress_array
from service.inference.blockwise.layout import Box, get_first_voxel, get_lengths, to_slices
from service.inference.blockwise.window_scores import GroupScores, list_window_positions
from service.inference.decoding.decoders import make_decoder
from service.inference.decoding.filters.smoothing import Smoother
from service.inference.decoding.pieces import WatershedParameters
from service.inference.decoding.postprocessing import apply_postprocessing, require_instances
from service.inference.decoding.streaming import select_foreground_logits
from service.inference.decoding.watershed_kernel import WatershedOptions, watershed_kernel
from service.inference.preprocessing.resample import find_nearest_voxels
from service.inference.windows.blending import Blending, BlendingSetup, make_blender

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import BlockTask, OpenRun
    from service.models.spec import ModelSpec

# Number of planes of a tile that are compressed together. The tile is compressed in slabs, because parts of it are read
# when the result is written.
SLAB_PLANES = 16

_FOLDERS = {"tile": "tiles", "holes": "holes"}


def make_decoding_spec(run: OpenRun) -> ModelSpec:
    """Return the model with the post-processing options of the run."""
    return apply_postprocessing(run.spec, run.plan.options.postprocessing, run.plan, run.plan.layout.size)


def decode_tile(
    run: OpenRun,
    task: BlockTask,
    blending: Blending,
    device: torch.device,
    stages: Stages,
) -> dict[str, Any]:
    """Decode a tile, and write the result. Return the fields of the block's record.

    The result contains the class of each voxel [Z, Y, X] or, for labels, the piece of each voxel. For labels, these
    arrays are also written to an archive:

    position, key, ...  as in `Pieces`; the fourth sum is as returned by `count_stack_voxels`
    face-A-S            pieces, from 1, as returned by `take_faces`
    """
    layout = run.plan.layout
    scores = GroupScores(run, layout.find_required_groups(task.number))
    if not scores:
        return {"empty": True}
    with stages.measure("blend"):
        scores_with_margin = blend_tile(run, task.number, scores, blending, device)
    spec, arrays = make_decoding_spec(run), dict[str, Array]()
    with stages.measure("decode"):
        if run.plan.output == "classes":
            decoder = make_decoder(spec, get_lengths(layout.get_tile(task.number)), "classes", None)
            decoder.add(0, 0, scores_with_margin[None])
            pixels: Array = decoder.finish().pixels
        else:
            pixels, arrays = _find_pieces(run, task, spec, scores_with_margin)
    with stages.measure("write"):
        record = write_pixels(run, f"tiles/{task.number}.raw", pixels)
        if arrays:
            run.folder.write_arrays(f"tiles/{task.number}.npz", arrays)
            record["pieces"] = len(arrays["key"])
    return {"empty": False, **record}


def write_pixels(run: OpenRun, name: str, pixels: Array) -> dict[str, Any]:
    """Write the voxels of a tile in slabs. Return their dtype and the end position of each slab in the file."""
    ends = [0]
    with run.folder.open_for_writing(name) as file:
        for first in range(0, len(pixels), SLAB_PLANES):
            ends.append(ends[-1] + file.write(compress_array(pixels[first : first + SLAB_PLANES])))
    return {"bytes": ends[-1], "ends": ends, "dtype": pixels.dtype.name}


def read_pixels(
    run: OpenRun, tile: int, box: tuple[slice, slice, slice], step: Literal["tile", "holes"] = "tile"
) -> Array:
    """Read the voxels of a box in a non-empty tile, which this step has written. `box` is relative to the tile."""
    record, path = run.folder.read_record(step, tile), run.folder.path / _FOLDERS[step] / f"{tile}.raw"
    depth, height, width = get_lengths(run.plan.layout.get_tile(tile))
    first, end, _ = box[0].indices(depth)
    slab_numbers = range(first // SLAB_PLANES, -(-end // SLAB_PLANES))
    slabs = list[Array]()
    with path.open("rb") as file:
        file.seek(record["ends"][slab_numbers.start])
        for index in slab_numbers:
            num_planes = min(SLAB_PLANES, depth - index * SLAB_PLANES)
            compressed_slab = file.read(record["ends"][index + 1] - record["ends"][index])
            slab = decompress_array(compressed_slab, (num_planes, height, width), record["dtype"])
            first_plane = index * SLAB_PLANES
            slabs.append(slab[max(first - first_plane, 0) : end - first_plane, box[1], box[2]])
    return np.concatenate(slabs)


def read_region_pieces(run: OpenRun, region: int, tiles: NDArray[np.int64], pieces: NDArray[np.int64]) -> Array:
    """Return the joined pieces of a region that contain `pieces` of its `tiles`, which have the same shape.

    All pieces are numbered from 0.
    """
    offsets = np.array(run.folder.read_record("region", region)["offsets"])
    numbers = run.folder.read_array(f"regions/{region}.npy")
    result: Array = numbers[offsets[tiles - run.plan.layout.list_tiles(region).start] + pieces]
    return result


def blend_tile(run: OpenRun, tile: int, scores: GroupScores, blending: Blending, device: torch.device) -> Tensor:
    """Return the blended scores of a tile with its margin, [K, z, y, x], bitwise equal to those of the whole volume."""
    layout = run.plan.layout
    margin_box = layout.get_tile_with_margin(tile)
    windows = layout.find_windows(margin_box)
    grid = layout.make_subgrid(windows)
    origin = list_window_positions(layout, windows)[0]
    first_scores = scores.read(origin)
    if layout.grid.num_windows == 1:
        valid_slices = tuple(slice(start, start + n) for start, n in zip(grid.pad_before, grid.size, strict=True))
        return first_scores[(slice(None), *valid_slices)]
    blender = make_blender(grid, len(first_scores), BlendingSetup(blending, device))
    blended_scores = torch.empty((len(first_scores), *get_lengths(margin_box)))
    for position, stored_position in zip(grid.positions(), list_window_positions(layout, windows), strict=True):
        for slab in blender.add([position], scores.read(stored_position).to(device)[None]):
            slab_box = tuple(
                (start, start + n) for start, n in zip((slab.z0, slab.y0, 0), slab.scores.shape[2:], strict=True)
            )
            _paste(slab.scores[0].cpu(), _shift_box(slab_box, origin), blended_scores, margin_box)
    return blended_scores


def _shift_box(box: Any, origin: Any) -> Box:
    z, y, x = ((first + start, end + start) for (first, end), start in zip(box, origin, strict=True))
    return z, y, x


def _paste(source: Tensor, source_box: Box, target: Tensor, target_box: Box) -> None:
    """Copy the voxels in the intersection of both boxes from `source` to `target`."""
    intersection = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(source_box, target_box, strict=True)]
    if all(first < end for first, end in intersection):
        z, y, x = intersection
        target_slices, source_slices = (
            to_slices((z, y, x), get_first_voxel(target_box)),
            to_slices((z, y, x), get_first_voxel(source_box)),
        )
        target[(slice(None), *target_slices)] = source[(slice(None), *source_slices)]


def _find_pieces(run: OpenRun, task: BlockTask, spec: ModelSpec, scores: Tensor) -> tuple[Array, dict[str, Array]]:
    """Return the piece of each voxel of a tile, [Z, Y, X], and the arrays that describe the pieces."""
    decoding, layout = require_instances(spec), run.plan.layout
    tile, margin_box = layout.get_tile(task.number), layout.get_tile_with_margin(task.number)
    heights = scores[spec.outputs.index(decoding.distance)]
    foreground = select_foreground_logits(spec, decoding, scores)
    if decoding.smoothing:
        smoother = Smoother(decoding.smoothing)
        heights = torch.cat([part for part, _ in (*smoother.add(heights.float(), foreground), *smoother.finish())])
    z, y, x = ((max(first - 1, 0), min(end + 1, n)) for (first, end), n in zip(tile, layout.size, strict=True))
    margin_slices = to_slices((z, y, x), get_first_voxel(margin_box))
    parameters = WatershedParameters.of_model(spec, decoding)
    # As one block: the pieces of several blocks would have to be linked.
    options = WatershedOptions(block_planes=len(heights))
    watershed = watershed_kernel.start(layout.size, parameters, options, tile)
    watershed.add(heights[margin_slices], foreground[margin_slices])
    pieces, numbers = watershed.collect_pieces(), watershed.pieces
    count = len(pieces.key)
    pixels: Array = numbers.astype(np.uint16 if count < 2**16 else np.uint32)
    sums = np.vstack((pieces.sums, count_stack_voxels(run, tile, pixels, count)[1:]))
    return pixels, {**pieces._replace(sums=sums)._asdict(), **take_faces(pixels)}


def take_faces(pixels: Array) -> dict[str, Array]:
    """Return the first (S = 0) and the last (S = 1) layer of a tile along each axis A, named `face-A-S`."""
    return {f"face-{axis}-{side}": pixels.take(-side, axis) for axis, side in itertools.product(range(3), (0, 1))}


def count_stack_voxels(run: OpenRun, tile: Box, pixels: Array, max_number: int) -> NDArray[np.int64]:
    """Return how many stack voxels each number in a tile has, from 0 to `max_number`, if the stack was resampled.

    A stack voxel has the number of the nearest tile voxel. If the stack was not resampled, the result is 0.
    """
    voxel_counts = np.zeros(max_number + 1, np.int64)
    if run.plan.layout.size == run.plan.size:
        return voxel_counts
    z, y, x = _count_nearest_voxels(tile, run.plan.layout.size, run.plan.size)
    plane_weights = (y[:, None] * x).ravel()
    for repeats, plane in zip(z.tolist(), pixels, strict=True):
        # These sums are small integers, so they are exact.
        voxel_counts += repeats * np.bincount(plane.ravel(), plane_weights, max_number + 1).astype(np.int64)
    return voxel_counts


def _count_nearest_voxels(tile: Box, size: Size, stack_size: Size) -> list[NDArray[np.int64]]:
    """Return for each axis and each position in a tile the number of positions in the stack to which it is nearest."""
    return [
        np.bincount(nearest, minlength=length)[slice(*span)]
        for nearest, length, span in zip(find_nearest_voxels(size, stack_size), size, tile, strict=True)
    ]
