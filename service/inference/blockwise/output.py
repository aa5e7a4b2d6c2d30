"""Output of a block-wise run: the result is written block by block, one resolution level after another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from service.core.quantities import Size
from service.core.types import Array, Objects, Segmentation, choose_label_dtype
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise.layout import Blocks, Box, get_first_voxel, get_lengths, to_ranges, to_slices
from service.inference.blockwise.objects.labels import label_tile
from service.inference.blockwise.tiles import make_decoding_spec, read_pixels
from service.inference.measurements import ObjectStatistics, measure_box, tabulate
from service.inference.preprocessing.resample import find_nearest_voxels
from service.inference.windows.grid import as_size

if TYPE_CHECKING:
    from service.formats.zarr.reader import ZarrStack
    from service.inference.blockwise.run_folder import OpenRun
    from service.inference.types import Table


def create_store(run: OpenRun, out: Path, provenance: Mapping[str, str]) -> None:
    """Create an empty store for the result, and record its levels and the block size of each level."""
    plan, spec = run.plan, make_decoding_spec(run)
    num_objects, class_names = None, spec.class_names
    if plan.output == "labels":
        num_objects, class_names = run.folder.read_record("objects")["objects"], ()
        dtype = choose_label_dtype(num_objects)
    else:
        dtype = np.dtype(np.uint8 if len(class_names) <= 256 else np.uint16)
    placeholder = np.broadcast_to(np.zeros((), dtype), plan.size)
    levels = zarr_writer.create(
        Segmentation(placeholder, plan.output, plan.voxel_size, num_objects, tuple(class_names)), out, provenance
    )
    levels_record = {
        "out": str(out),
        "levels": [{"steps": level.steps, "block": level.block_shape} for level in levels],
    }
    run.folder.write_levels(levels_record)


def write_block(run: OpenRun, number: int) -> dict[str, Any]:
    """Write one block of the result. Blocks are numbered consecutively across all levels.

    Each coarser level is made from the previous level.
    """
    record = run.folder.levels
    out, levels = Path(record["out"]), record["levels"]
    for level, blocks in enumerate(_list_blocks_by_level(run.plan.size, levels)):
        if number >= len(blocks):
            number -= len(blocks)
            continue
        box = blocks.get_box(number)
        pixels = _coarsen_block(out, level, levels, box) if level else _collect_block(run, box)
        is_measured = run.plan.measures_objects and not level and pixels.any()
        if is_measured:
            _measure_block(run, number, box, pixels)
        if pixels.any():
            zarr_writer.open_level(out, level)[to_slices(box)] = pixels
        return {"measured": True} if is_measured else {}
    raise IndexError(number)


def _measure_block(run: OpenRun, number: int, box: Box, labels: Array) -> None:
    """Measure the objects in a block of labels in every channel of the stack, and write the measurements."""
    with open_all_channels(run) as stack:
        object_numbers, sums = measure_box(labels, stack.read_region(to_ranges(box)), get_first_voxel(box))
    run.folder.write_arrays(f"measured/{number}.npz", {"numbers": object_numbers, **sums._asdict()})


def collect_table(run: OpenRun, objects: Objects) -> Table:
    """Return the measurements of all objects. All blocks of labels must have been written."""
    with open_all_channels(run) as stack:
        sums = ObjectStatistics.zeros(len(objects) + 1, stack.shape[0], stack.dtype)
    for number in sorted(run.folder.find_finished_blocks("labels")):
        if run.folder.read_record("labels", number).get("measured"):
            with run.folder.read_arrays(f"measured/{number}.npz") as archive:
                sums.add_objects(
                    archive["numbers"], ObjectStatistics(*(archive[name] for name in ObjectStatistics._fields))
                )
    return tabulate(sums, run.plan.size, run.plan.voxel_size, objects)


def open_all_channels(run: OpenRun) -> AbstractContextManager[ZarrStack]:
    """Open the stack with all of its channels, including those that were not segmented."""
    return stack_reader.open_blocks(run.plan.source, replace(run.plan.selection, channel=None))


def _list_blocks_by_level(size: Size, levels: Sequence[Mapping[str, Any]]) -> list[Blocks]:
    """Return the blocks of each level."""
    return [
        Blocks(
            as_size([-(-n // step) for n, step in zip(size, level["steps"], strict=True)]),
            as_size(level["block"]),
        )
        for level in levels
    ]


def _collect_block(run: OpenRun, box: Box) -> Array:
    """Return a block of the result. Each voxel gets the value of the nearest voxel in the tiles."""
    layout, has_objects = run.plan.layout, run.plan.output == "labels"
    read_tile, dtype = (label_tile, np.uint32) if has_objects else (read_pixels, np.uint16)
    pixels: Array = np.zeros(get_lengths(box), dtype)
    nearest_axes = _find_nearest_voxels(run, box)
    for number in layout.find_tiles(_get_bounding_box(nearest_axes)):
        tile = layout.get_tile(number)
        spans = [np.searchsorted(axis, span) for axis, span in zip(nearest_axes, tile, strict=True)]
        # Holes may extend into empty tiles. If the stack was upsampled, a tile may contain no voxel of the stack.
        is_empty = not has_objects and run.folder.read_record("tile", number)["empty"]
        if is_empty or any(first == end for first, end in spans):
            continue
        positions = [
            axis[slice(*span)] - first
            for axis, span, first in zip(nearest_axes, spans, get_first_voxel(tile), strict=True)
        ]
        tile_pixels = read_tile(run, number, to_slices(_get_bounding_box(positions)))
        pixels[tuple(slice(*span) for span in spans)] = _take_positions(tile_pixels, positions)
    return pixels


def _find_nearest_voxels(run: OpenRun, box: Box) -> list[NDArray[np.intp]]:
    """Return, for each axis and each position in a box of the stack, the nearest position on the network's grid."""
    axes = find_nearest_voxels(run.plan.layout.size, run.plan.size)
    return [axis[slice(*span)] for axis, span in zip(axes, box, strict=True)]


def _take_positions(tile_pixels: Array, positions: Sequence[NDArray[np.intp]]) -> Array:
    """Return the voxels at ascending positions along (z, y, x). `tile_pixels` starts at the first position."""
    if tile_pixels.shape == tuple(map(len, positions)):
        return tile_pixels
    return tile_pixels[np.ix_(*(axis - axis[0] for axis in positions))]


def _get_bounding_box(axes: Sequence[NDArray[np.intp]]) -> Box:
    """Return the smallest box that contains ascending positions along (z, y, x)."""
    z, y, x = ((int(axis[0]), int(axis[-1]) + 1) for axis in axes)
    return z, y, x


def _coarsen_block(out: Path, level: int, levels: Sequence[Mapping[str, Any]], box: Box) -> Array:
    """Return a block of a coarser level, which contains every other voxel of the previous level along some axes."""
    finer_level = zarr_writer.open_level(out, level - 1)
    steps = [
        step // finer_step for step, finer_step in zip(levels[level]["steps"], levels[level - 1]["steps"], strict=True)
    ]
    pixels: Array = np.empty(get_lengths(box), finer_level.dtype)
    # Read about one finer block at a time, because all chunks of one access are decoded together.
    axes = [
        itertools.pairwise([*range(first, end, -(-block_length // step)), end])
        for (first, end), block_length, step in zip(box, levels[level - 1]["block"], steps, strict=True)
    ]
    for z, y, x in itertools.product(*axes):
        source_slices = [slice(first * step, end * step) for (first, end), step in zip((z, y, x), steps, strict=True)]
        pixels[to_slices((z, y, x), get_first_voxel(box))] = finer_level[tuple(source_slices)][
            :: steps[0], :: steps[1], :: steps[2]
        ]
    return pixels


def list_level_blocks(run: OpenRun) -> list[range]:
    """Return the numbers of the blocks of each level."""
    block_counts = [len(blocks) for blocks in _list_blocks_by_level(run.plan.size, run.folder.levels["levels"])]
    ends = list(itertools.accumulate(block_counts))
    return [range(end - count, end) for count, end in zip(block_counts, ends, strict=True)]
