"""Writing of the result, a block of one resolution after the other."""

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
    """Make the store of the result without pixels, and write which blocks it has."""
    plan, spec = run.plan, decoding_spec(run)
    count, names = None, spec.outputs
    if plan.output == "labels":
        count, names = run.folder.read_record("join")["objects"], ()
        dtype = label_dtype(count)
    else:
        dtype = np.dtype(np.uint8 if len(names) <= 256 else np.uint16)
        if isinstance(spec.decoding, Instances):
            names = ("background", spec.decoding.foreground)
    nothing = np.broadcast_to(np.zeros((), dtype), plan.size)
    levels = zarr_writer.create(Segmentation(nothing, plan.output, plan.voxel_size, count, tuple(names)), out, origin)
    facts = {"out": str(out), "levels": [{"steps": level.steps, "block": level.block} for level in levels]}
    run.folder.write_levels(facts)


def write_block(run: OpenRun, number: int) -> dict[str, Any]:
    """Write one block, by its number among those of all resolutions; coarser ones are made of the one before."""
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
    """Write what a block of labels has of its objects, in every channel of the stack."""
    with open_every_channel(run) as stack:
        numbers, sums = measure_box(labels, stack.read_region(ranges(box)), firsts(box))
    run.folder.write_arrays(f"measured/{number}.npz", {"numbers": numbers, **sums._asdict()})


def collect_table(run: OpenRun, objects: Objects) -> Table:
    """Return the measurements of all objects, once all labels are written."""
    with open_every_channel(run) as stack:
        sums = ObjectSums.zeros(len(objects) + 1, stack.shape[0], stack.dtype)
    for number in sorted(run.folder.done("labels")):
        if run.folder.read_record("labels", number).get("measured"):
            with run.folder.read_arrays(f"measured/{number}.npz") as found:
                sums.add_objects(found["numbers"], ObjectSums(*(found[name] for name in ObjectSums._fields)))
    return tabulate(sums, run.plan.size, run.plan.voxel_size, objects)


def open_every_channel(run: OpenRun) -> AbstractContextManager[ZarrStack]:
    """Open the stack with all channels, whichever are segmented."""
    return stack_reader.open_blocks(run.plan.source, replace(run.plan.selection, channel=None))


def _cut_levels(size: Size, levels: Sequence[Mapping[str, Any]]) -> list[Blocks]:
    """Return the blocks of each resolution."""
    return [
        Blocks(
            as_size([-(-n // step) for n, step in zip(size, known["steps"], strict=True)]),
            as_size(known["block"]),
        )
        for known in levels
    ]


def _collect(run: OpenRun, box: Box) -> Array:
    """Return a block of the stack's grid, whose voxels have what the tiles have at the nearest one of theirs."""
    layout, read = run.plan.layout, label_tile if run.plan.output == "labels" else read_pixels
    pixels: Array = np.zeros(lengths(box), np.uint32 if run.plan.output == "labels" else np.uint16)
    nearest = _nearest_in(run, box)
    for number in layout.tiles_of(_spanned(nearest)):
        tile = layout.tile(number)
        spans = [np.searchsorted(axis, span) for axis, span in zip(nearest, tile, strict=True)]
        # The stack may have no voxel along an axis for a tile.
        if run.folder.read_record("tile", number)["empty"] or any(first == end for first, end in spans):
            continue
        places = [axis[slice(*span)] - first for axis, span, first in zip(nearest, spans, firsts(tile), strict=True)]
        part = read(run, number, slices(_spanned(places)))
        pixels[tuple(slice(*span) for span in spans)] = _at_places(part, places)
    return pixels


def _nearest_in(run: OpenRun, box: Box) -> list[NDArray[np.intp]]:
    """Return along each axis the nearest voxel of the network's grid to each one of a box of the stack's."""
    axes = nearest_voxels(run.plan.layout.size, run.plan.size)
    return [axis[slice(*span)] for axis, span in zip(axes, box, strict=True)]


def _at_places(part: Array, places: Sequence[NDArray[np.intp]]) -> Array:
    """Return the voxels of a part at ascending places along (z, y, x), the first of which is where the part begins."""
    if part.shape == tuple(map(len, places)):
        return part
    return part[np.ix_(*(axis - axis[0] for axis in places))]


def _spanned(axes: Sequence[NDArray[np.intp]]) -> Box:
    """Return the first voxel and the end of ascending places along (z, y, x)."""
    z, y, x = ((int(axis[0]), int(axis[-1]) + 1) for axis in axes)
    return z, y, x


def _coarsen(out: Path, level: int, levels: Sequence[Mapping[str, Any]], box: Box) -> Array:
    """Return a block of a coarser resolution: every second voxel of the one before along some axes."""
    finer = zarr_writer.open_level(out, level - 1)
    steps = [now // before for now, before in zip(levels[level]["steps"], levels[level - 1]["steps"], strict=True)]
    pixels: Array = np.empty(lengths(box), finer.dtype)
    # About one finer block at a time: all chunks of what is read are decoded at once.
    axes = [
        itertools.pairwise([*range(first, end, -(-edge // step)), end])
        for (first, end), edge, step in zip(box, levels[level - 1]["block"], steps, strict=True)
    ]
    for z, y, x in itertools.product(*axes):
        there = [slice(first * step, end * step) for (first, end), step in zip((z, y, x), steps, strict=True)]
        pixels[slices((z, y, x), firsts(box))] = finer[tuple(there)][:: steps[0], :: steps[1], :: steps[2]]
    return pixels


def blocks_of_levels(run: OpenRun) -> list[range]:
    """Return the numbers of the blocks of each resolution."""
    counts = [len(blocks) for blocks in _cut_levels(run.plan.size, run.folder.levels["levels"])]
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
