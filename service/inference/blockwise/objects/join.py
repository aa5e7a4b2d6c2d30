"""Merge the pieces of all regions into objects, number the objects, and look up the labels of a tile.

Only a few numbers per piece of a region are held in memory, or in a memory-mapped file if there are many pieces. All
other data is read region by region. A pass is the saddle between two pieces or basins, as in `basin_merging`.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from service.core.buffers import make_allocator
from service.core.types import Array, Objects, choose_label_dtype
from service.inference.blockwise.layout import TILES_PER_REGION
from service.inference.blockwise.tiles import make_decoding_spec, read_region_pieces
from service.inference.decoding.basin_merging import MergeForest, Persistence
from service.inference.decoding.instances import compute_min_object_confidence, compute_min_object_voxels
from service.inference.decoding.labels import gather_objects
from service.inference.decoding.postprocessing import require_instances
from service.inference.decoding.watershed import compute_heights

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import OpenRun
    from service.models.spec_parts import Instances

# Number of pieces that are processed together.
PIECES_PER_STEP = 2**20
# Number of passes that are processed together. Each pass takes about 100 bytes when it is converted to Python integers.
PASSES_PER_STEP = 2**20

# Shallow pass between the basins `first` and `second`, where `first` < `second`. The height is a distance, as in
# `ShallowPasses`.
_PASS = np.dtype([("height", np.float64), ("first", np.int64), ("second", np.int64)])


class _Regions(NamedTuple):
    """Regions that contain pieces. The pieces of all regions are numbered consecutively from 0.

    numbers  numbers of the regions
    offsets  number of pieces before each region, followed by the total number of pieces
    """

    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @classmethod
    def list(cls, run: OpenRun) -> _Regions:
        """Return the regions of a run."""
        counts = [run.folder.read_record("region", region)["roots"] for region in range(run.plan.layout.num_regions)]
        numbers = np.flatnonzero(counts)
        return cls(numbers, np.append(0, np.cumsum(np.array(counts, np.int64)[numbers])))

    def open_archives(self, run: OpenRun) -> Iterator[tuple[slice, NpzFile]]:
        """Yield, for each region, the slice of its pieces in arrays of all pieces, and its archive."""
        for number, (first, end) in zip(self.numbers.tolist(), itertools.pairwise(self.offsets.tolist()), strict=True):
            with run.folder.read_arrays(f"regions/{number}.npz") as archive:
                yield slice(first, end), archive


class _Maxima(NamedTuple):
    """Pieces that contain the maximum of a basin, in order of their numbers. All arrays have the shape [R].

    piece     number of the piece
    basin     number of the basin; basins are numbered in the order of their maxima in the volume
    peak_key  key of the height at the maximum of each basin, int32, in order of the basins
    """

    piece: NDArray[np.integer]
    basin: NDArray[np.integer]
    peak_key: NDArray[np.int32]


def join_regions(run: OpenRun) -> dict[str, Any]:
    """Write the objects and the object of each piece of all regions. Return the fields of the block's record.

    `labels.npy` contains the number of the object of each piece, or 0 if the object was removed; `offsets.npy` the
    number of pieces before each region; `candidates.npy` the objects that the decoder does not remove, float64 [4, N]:
    number of voxels, confidence, peak, and number of voxels in the stack if the stack was resampled.
    """
    spec = make_decoding_spec(run)
    decoding, persistence = require_instances(spec), Persistence.of_model(spec, require_instances(spec))
    regions = _Regions.list(run)
    basin_of_piece = _follow_links(run, regions)
    maxima = _find_maxima(run, regions, basin_of_piece)
    _number_basins(basin_of_piece, maxima)
    peaks = persistence.to_distances(compute_heights(torch.from_numpy(maxima.peak_key))).numpy()
    forest = MergeForest(peaks, persistence.depth)
    with tempfile.TemporaryFile(dir=run.folder.path) as passes_file:

        def write_passes(basins: NDArray[np.integer], keys: NDArray[np.int32]) -> None:
            passes_file.write(_select_shallow_passes(basins, keys, peaks, persistence))

        sums, touches_face = _sum_pieces(run, regions, basin_of_piece, write_passes)
        num_passes = passes_file.tell() // _PASS.itemsize
        for part in _sort_descending(np.memmap(passes_file, _PASS) if num_passes else np.zeros(0, _PASS)):
            forest.join(part["first"], part["second"], part["height"])
    object_of_basin = np.unique(forest.find_highest_basins(), return_inverse=True)[1]
    objects = gather_objects(object_of_basin, sums[0], sums[1], peaks)
    is_kept = _choose_objects(run, decoding, objects, object_of_basin[touches_face])
    stack_voxels = np.zeros(len(objects), np.int64)
    np.add.at(stack_voxels, object_of_basin, sums[2])
    objects = objects.select(is_kept)
    run.folder.write_array(
        "candidates.npy", np.stack([objects.voxel_counts, objects.confidence, objects.peaks, stack_voxels[is_kept]])
    )
    object_numbers = np.where(is_kept, is_kept.cumsum(), 0).astype(choose_label_dtype(len(objects)))
    _write_labels(run, basin_of_piece, object_numbers[object_of_basin])
    offsets = np.zeros(run.plan.layout.num_regions, np.int64)
    offsets[regions.numbers] = regions.offsets[:-1]
    run.folder.write_array("offsets.npy", offsets)
    return {"objects": len(objects), "pieces": len(basin_of_piece), "basins": len(peaks), "passes": num_passes}


def _choose_objects(
    run: OpenRun, decoding: Instances, objects: Objects, border_objects: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether the decoder keeps each object. `border_objects` lists those that touch a face of the volume."""
    is_kept: NDArray[np.bool_] = objects.voxel_counts >= max(decoding.minimum_size, 1)
    if decoding.border == "drop":
        is_kept[border_objects] = False
    selected_objects = objects.select(is_kept)
    voxel_limit = compute_min_object_voxels(
        run.spec.input.diameter or math.inf, decoding, selected_objects, run.plan.layout.size
    )
    is_confident = objects.confidence >= compute_min_object_confidence(decoding, selected_objects)
    return is_kept & is_confident & (objects.voxel_counts >= voxel_limit)


def _follow_links(run: OpenRun, regions: _Regions) -> Array:
    """Return, for each piece, the piece at the end of its chain of links, which contains the maximum of the basin."""
    allocate, num_pieces = make_allocator(run.folder.path), int(regions.offsets[-1])
    link = allocate((num_pieces,), np.int32 if num_pieces < 2**31 else np.int64)
    for part in _split_into_slices(link):
        link[part] = np.arange(part.start, part.stop)
    offset_of_region = dict(zip(regions.numbers.tolist(), regions.offsets.tolist(), strict=False))
    for part, archive in regions.open_archives(run):
        pieces, tiles, targets = archive["links"]
        for region in np.unique(tiles // TILES_PER_REGION).tolist():
            is_in_region = tiles // TILES_PER_REGION == region
            numbers = read_region_pieces(run, region, tiles[is_in_region], targets[is_in_region])
            link[part.start + pieces[is_in_region]] = offset_of_region[region] + numbers
    is_converged = False
    while not is_converged:
        is_converged = True
        for part in _split_into_slices(link):
            next_link = link[link[part]]
            is_converged &= np.array_equal(next_link, link[part])
            link[part] = next_link
    return link


def _split_into_slices(pieces: Array) -> Iterator[slice]:
    for first in range(0, len(pieces), PIECES_PER_STEP):
        yield slice(first, min(first + PIECES_PER_STEP, len(pieces)))


def _find_maxima(run: OpenRun, regions: _Regions, link: Array) -> _Maxima:
    pieces, positions, peak_keys = [link[:0]], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for part, archive in regions.open_archives(run):
        piece_numbers = np.arange(part.start, part.stop)
        own_maxima = np.flatnonzero(link[part] == piece_numbers)
        pieces.append(piece_numbers[own_maxima].astype(link.dtype))
        positions.append(archive["position"][own_maxima])
        peak_keys.append(archive["key"][own_maxima])
    piece, order = np.concatenate(pieces), np.concatenate(positions).argsort(kind="stable")
    basin = np.empty_like(piece)
    basin[order] = np.arange(len(order))
    return _Maxima(piece, basin, np.concatenate(peak_keys)[order])


def _number_basins(link: Array, maxima: _Maxima) -> None:
    """Replace each piece that contains a maximum with the number of its basin."""
    for part in _split_into_slices(link):
        link[part] = maxima.basin[np.searchsorted(maxima.piece, link[part])]


def _sum_pieces(
    run: OpenRun,
    regions: _Regions,
    basin_of_piece: Array,
    write_passes: Callable[[NDArray[np.integer], NDArray[np.int32]], None],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the sums of `RegionPieces` over the pieces of each basin, [3, R], and whether it touches a face, [R].

    write_passes  called once for each region with the basins [E, 2] and the keys [E] of its passes
    """
    num_basins = int(basin_of_piece.max(initial=-1)) + 1
    sums, touches_face = np.zeros((3, num_basins), np.int64), np.zeros(num_basins, np.bool_)
    for part, archive in regions.open_archives(run):
        basins, passes = basin_of_piece[part], archive["passes"]
        for total, values in zip(sums, archive["sums"], strict=True):
            np.add.at(total, basins, values)
        touches_face[basins[archive["touches_face"]]] = True
        write_passes(basins[passes[:, :2]], passes[:, 2])
    return sums, touches_face


def _select_shallow_passes(
    basins: NDArray[np.integer], keys: NDArray[np.int32], peaks: NDArray[np.float64], persistence: Persistence
) -> bytes:
    """Return the passes that can merge two basins as the bytes of an array of `_PASS`."""
    heights = persistence.to_distances(compute_heights(torch.from_numpy(np.ascontiguousarray(keys)))).numpy()
    first, second = basins.min(1), basins.max(1)
    is_shallow = (first != second) & (np.minimum(peaks[first], peaks[second]) - heights < persistence.depth)
    shallow_passes = np.empty(int(is_shallow.sum()), _PASS)
    for name, column in (("height", heights), ("first", first), ("second", second)):
        shallow_passes[name] = column[is_shallow]
    return shallow_passes.tobytes()


def _sort_descending(passes: Array) -> Iterator[Array]:
    """Yield passes in descending order of height, about `PASSES_PER_STEP` at a time.

    Passes of equal height are sorted by their basins. Several regions may have passes between the same two basins. The
    lower passes have no effect: either the basins have already been merged, or the lower peak rises even farther above
    these passes.
    """
    sample = np.sort(passes["height"][:: max(len(passes) // 2**16, 1)])
    height_limits = (
        sample[:: max(len(sample) * PASSES_PER_STEP // max(len(passes), 1), 1)]
        if len(passes) > PASSES_PER_STEP
        else sample[:0]
    )
    height_limits = np.concatenate(([-np.inf], np.unique(height_limits), [np.inf]))
    for upper, lower in itertools.pairwise(height_limits[::-1]):
        parts = (passes[first : first + PASSES_PER_STEP] for first in range(0, len(passes), PASSES_PER_STEP))
        passes_in_range = np.concatenate(
            [passes[:0], *(part[(part["height"] > lower) & (part["height"] <= upper)] for part in parts)]
        )
        yield passes_in_range[
            np.lexsort((passes_in_range["second"], passes_in_range["first"], -passes_in_range["height"]))
        ]


def _write_labels(run: OpenRun, basin_of_piece: Array, labels: Array) -> None:
    """Write the label of each piece, given the labels of the basins."""
    with run.folder.open_for_writing("labels.npy") as file:
        header = {"descr": labels.dtype.str, "fortran_order": False, "shape": basin_of_piece.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for part in _split_into_slices(basin_of_piece):
            file.write(labels[basin_of_piece[part]].data)
