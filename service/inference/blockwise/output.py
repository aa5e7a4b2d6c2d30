"""Writing of the result in blocks, one resolution level after the other."""

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
from service.core.types import Array, Objects, Segmentation, label_dtype
from service.formats import stack_reader
from service.formats.zarr import writer as zarr_writer
from service.inference.blockwise.join import label_tile
from service.inference.blockwise.layout import Blocks, Box, firsts, lengths, ranges, slices
from service.inference.blockwise.tiles import decoding_spec, read_pixels
from service.inference.measurements import ObjectSums, measure_box, tabulate
from service.inference.preprocessing.resample import nearest_voxels
from service.inference.windows.grid import as_size
from service.models.spec import Instances

if TYPE_CHECKING:
    from service.formats.zarr.reader import ZarrStack
    from service.inference.blockwise.run_folder import OpenRun
    from service.inference.types import Table


def create_store(run: OpenRun, out: Path, origin: Mapping[str, str]) -> None:
    """Create the store of the result without pixels, and write the list of its levels and blocks."""
    plan, spec = run.plan, decoding_spec(run)
    count, names = None, spec.outputs
    if plan.output == "labels":
        count, names = run.folder.read_record("join")["objects"], ()
        dtype = label_dtype(count)
    else:
        dtype = np.dtype(np.uint8 if len(names) <= 256 else np.uint16)
        if isinstance(spec.decoding, Instances):
            names = ("background", spec.decoding.foreground)
    no_pixels = np.broadcast_to(np.zeros((), dtype), plan.size)
    levels = zarr_writer.create(Segmentation(no_pixels, plan.output, plan.voxel_size, count, tuple(names)), out, origin)
    facts = {"out": str(out), "levels": [{"steps": level.steps, "block": level.block} for level in levels]}
    run.folder.write_levels(facts)


def write_block(run: OpenRun, number: int) -> dict[str, Any]:
    """Write one block. Blocks are numbered through all levels, and each coarser level is made from the one before."""
    facts = run.folder.levels
    out, levels = Path(facts["out"]), facts["levels"]
    for level, blocks in enumerate(_cut_levels(run.plan.size, levels)):
        if number >= len(blocks):
            number -= len(blocks)
            continue
        box = blocks.box(number)
        pixels = _coarsen(out, level, levels, box) if level else _collect(run, box)
        is_measured = run.plan.measured and not level and pixels.any()
        if is_measured:
            _measure(run, number, box, pixels)
        if pixels.any():
            zarr_writer.open_level(out, level)[slices(box)] = pixels
        return {"measured": True} if is_measured else {}
    raise IndexError(number)


def _measure(run: OpenRun, number: int, box: Box, labels: Array) -> None:
    """Write the measurements of the objects in a block of labels, for every channel of the stack."""
    with open_all_channels(run) as stack:
        numbers, sums = measure_box(labels, stack.read_region(ranges(box)), firsts(box))
    run.folder.write_arrays(f"measured/{number}.npz", {"numbers": numbers, **sums._asdict()})


def collect_table(run: OpenRun, objects: Objects) -> Table:
    """Return the measurements of all objects. All labels must have been written."""
    with open_all_channels(run) as stack:
        sums = ObjectSums.zeros(len(objects) + 1, stack.shape[0], stack.dtype)
    for number in sorted(run.folder.finished_blocks("labels")):
        if run.folder.read_record("labels", number).get("measured"):
            with run.folder.read_arrays(f"measured/{number}.npz") as archive:
                sums.add_objects(archive["numbers"], ObjectSums(*(archive[name] for name in ObjectSums._fields)))
    return tabulate(sums, run.plan.size, run.plan.voxel_size, objects)


def open_all_channels(run: OpenRun) -> AbstractContextManager[ZarrStack]:
    """Open the stack with all channels, not only the segmented ones."""
    return stack_reader.open_blocks(run.plan.source, replace(run.plan.selection, channel=None))


def _cut_levels(size: Size, levels: Sequence[Mapping[str, Any]]) -> list[Blocks]:
    """Return the blocks of each level."""
    return [
        Blocks(
            as_size([-(-n // step) for n, step in zip(size, level["steps"], strict=True)]),
            as_size(level["block"]),
        )
        for level in levels
    ]


def _collect(run: OpenRun, box: Box) -> Array:
    """Return a block on the grid of the stack. Each voxel gets the value of the nearest voxel of the tiles."""
    layout, read = run.plan.layout, label_tile if run.plan.output == "labels" else read_pixels
    pixels: Array = np.zeros(lengths(box), np.uint32 if run.plan.output == "labels" else np.uint16)
    nearest = _nearest_in(run, box)
    for number in layout.tiles_of(_span(nearest)):
        tile = layout.tile(number)
        spans = [np.searchsorted(axis, span) for axis, span in zip(nearest, tile, strict=True)]
        # If the stack was upsampled, a tile may contain no voxel of the stack.
        if run.folder.read_record("tile", number)["empty"] or any(first == end for first, end in spans):
            continue
        positions = [axis[slice(*span)] - first for axis, span, first in zip(nearest, spans, firsts(tile), strict=True)]
        tile_pixels = read(run, number, slices(_span(positions)))
        pixels[tuple(slice(*span) for span in spans)] = _take_positions(tile_pixels, positions)
    return pixels


def _nearest_in(run: OpenRun, box: Box) -> list[NDArray[np.intp]]:
    """Return, along each axis, the nearest voxel of the network's grid for each voxel of a box of the stack."""
    axes = nearest_voxels(run.plan.layout.size, run.plan.size)
    return [axis[slice(*span)] for axis, span in zip(axes, box, strict=True)]


def _take_positions(tile_pixels: Array, positions: Sequence[NDArray[np.intp]]) -> Array:
    """Return the voxels of a part at ascending positions along (z, y, x). The part starts at the first of them."""
    if tile_pixels.shape == tuple(map(len, positions)):
        return tile_pixels
    return tile_pixels[np.ix_(*(axis - axis[0] for axis in positions))]


def _span(axes: Sequence[NDArray[np.intp]]) -> Box:
    """Return the box that ascending positions along (z, y, x) span."""
    z, y, x = ((int(axis[0]), int(axis[-1]) + 1) for axis in axes)
    return z, y, x


def _coarsen(out: Path, level: int, levels: Sequence[Mapping[str, Any]], box: Box) -> Array:
    """Return a block of a coarser level, which has every second voxel of the previous level along some axes."""
    finer = zarr_writer.open_level(out, level - 1)
    steps = [
        step // finer_step for step, finer_step in zip(levels[level]["steps"], levels[level - 1]["steps"], strict=True)
    ]
    pixels: Array = np.empty(lengths(box), finer.dtype)
    # Read about one finer block at a time, because all chunks of one access are decoded together.
    axes = [
        itertools.pairwise([*range(first, end, -(-edge // step)), end])
        for (first, end), edge, step in zip(box, levels[level - 1]["block"], steps, strict=True)
    ]
    for z, y, x in itertools.product(*axes):
        source = [slice(first * step, end * step) for (first, end), step in zip((z, y, x), steps, strict=True)]
        pixels[slices((z, y, x), firsts(box))] = finer[tuple(source)][:: steps[0], :: steps[1], :: steps[2]]
    return pixels


def list_level_blocks(run: OpenRun) -> list[range]:
    """Return the numbers of the blocks of each level."""
    counts = [len(blocks) for blocks in _cut_levels(run.plan.size, run.folder.levels["levels"])]
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
