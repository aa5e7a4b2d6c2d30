"""Link the watershed pieces of adjacent tiles, and merge all pieces into numbered objects.

Only one number per piece is held in memory, or in a memory-mapped file if there are many pieces. All other data is read
tile by tile. A pass is the saddle between two pieces or basins, as in `basin_merging`.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from service.core.buffers import make_allocator
from service.core.types import Array, Objects, choose_label_dtype
from service.inference.blockwise.layout import get_first_voxel
from service.inference.blockwise.tiles import make_decoding_spec, read_pixels
from service.inference.decoding.basin_merging import MergeForest, Persistence, find_shallow_passes
from service.inference.decoding.instances import compute_min_object_confidence, compute_min_object_voxels
from service.inference.decoding.labels import gather_objects
from service.inference.decoding.postprocessing import compute_min_voxels, require_instances
from service.inference.decoding.watershed import Basins, Passes, compute_heights

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


class _Tiles(NamedTuple):
    """Tiles that contain pieces. Pieces are numbered consecutively across all tiles, and 0 is the background.

    numbers  numbers of the tiles
    offsets  number of pieces before each tile, followed by the total number of pieces
    """

    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return int(self.offsets[-1])

    def open_archives(self, run: OpenRun) -> Iterator[tuple[int, slice, NpzFile]]:
        """Yield the number of each tile, the slice of its pieces in arrays of all pieces, and its archive.

        The first entry of an array of all pieces belongs to the background.
        """
        for number, (first, end) in zip(self.numbers.tolist(), itertools.pairwise(self.offsets.tolist()), strict=True):
            with run.folder.read_arrays(f"tiles/{number}.npz") as archive:
                yield number, slice(first + 1, end + 1), archive


class _Maxima(NamedTuple):
    """Pieces that contain the maximum of a basin, in order of their numbers. All arrays have the shape [R].

    piece     number of the piece
    basin     number of the basin; basins are numbered in the order of their maxima in the volume
    peak_key  key of the height at the maximum of each basin, int32, in order of the basins
    """

    piece: NDArray[np.integer]
    basin: NDArray[np.integer]
    peak_key: NDArray[np.int32]


class _Sums(NamedTuple):
    """Sums over the voxels of each basin, int64 [R], and whether the basin touches a face of the volume.

    If the stack was resampled, `stack_voxels` is the number of voxels in the original stack.
    """

    voxels: NDArray[np.int64]
    stack_voxels: NDArray[np.int64]
    foreground: NDArray[np.int64]
    touches_face: NDArray[np.bool_]


def join_tiles(run: OpenRun) -> dict[str, Any]:
    """Write the labels of the pieces of all tiles. Return the fields of the block's record."""
    spec = make_decoding_spec(run)
    decoding = require_instances(spec)
    tiles = _list_tiles(run)
    persistence = Persistence.of_model(spec, decoding)
    basin_of_piece = _follow_links(run, tiles)
    maxima = _find_maxima(run, tiles, basin_of_piece)
    _number_basins(basin_of_piece, maxima)
    heights = compute_heights(torch.from_numpy(maxima.peak_key))
    forest = MergeForest(persistence.to_distances(heights).numpy(), persistence.depth)
    with tempfile.TemporaryFile(dir=run.folder.path) as passes_file:

        def write_passes(basins: NDArray[np.integer], keys: NDArray[np.int32]) -> None:
            passes_file.write(_select_shallow_passes(basins, keys, heights, persistence))

        sums = _sum_pieces(run, tiles, basin_of_piece, write_passes)
        num_passes = passes_file.tell() // _PASS.itemsize
        for part in _sort_descending(np.memmap(passes_file, _PASS) if num_passes else np.zeros(0, _PASS)):
            forest.join(part["first"], part["second"], part["height"])
    object_of_basin = np.unique(forest.find_highest_basins(), return_inverse=True)[1]
    objects, is_kept = _choose_objects(run, decoding, object_of_basin, sums, persistence.to_distances(heights).numpy())
    num_objects = int(np.count_nonzero(is_kept))
    object_labels = np.where(is_kept, is_kept.cumsum(), 0)
    # The last label is the label of the background.
    _write_labels(
        run, basin_of_piece, np.append(object_labels[object_of_basin], 0).astype(choose_label_dtype(num_objects))
    )
    run.folder.write_array("offsets.npy", np.array([tiles.numbers, tiles.offsets[:-1]]))
    final_objects = objects.select(is_kept)
    run.folder.write_array(
        "objects.npy", np.stack([final_objects.voxel_counts, final_objects.confidence, final_objects.peaks])
    )
    return {"objects": num_objects, "pieces": tiles.num_pieces, "basins": len(heights), "passes": num_passes}


def _choose_objects(
    run: OpenRun, decoding: Instances, object_of_basin: NDArray[np.int64], sums: _Sums, heights: NDArray[np.float64]
) -> tuple[Objects, NDArray[np.bool_]]:
    """Return the objects, and whether each object gets a label.

    object_of_basin, heights  for each basin, the number of its object, and the height of its maximum as a distance
    """
    objects = gather_objects(object_of_basin, sums.voxels, sums.foreground, heights)
    is_kept = objects.voxel_counts >= max(decoding.minimum_size, 1)
    if decoding.border == "drop":
        is_kept[object_of_basin[sums.touches_face]] = False
    selected_objects = objects.select(is_kept)
    voxel_limit = compute_min_object_voxels(
        run.spec.input.diameter or math.inf, decoding, selected_objects, run.plan.layout.size
    )
    is_kept &= (objects.confidence >= compute_min_object_confidence(decoding, selected_objects)) & (
        objects.voxel_counts >= voxel_limit
    )
    if run.plan.layout.size != run.plan.size:
        stack_voxels = np.zeros(len(objects), np.int64)
        np.add.at(stack_voxels, object_of_basin, sums.stack_voxels)
        is_kept &= stack_voxels >= max(compute_min_voxels(run.plan.options.postprocessing, run.plan), 1)
    return objects, is_kept


def _list_tiles(run: OpenRun) -> _Tiles:
    piece_counts = [
        run.folder.read_record("tile", tile).get("pieces", 0) for tile in range(run.plan.layout.total_groups)
    ]
    tile_numbers = np.flatnonzero(piece_counts)
    return _Tiles(tile_numbers, np.append(0, np.cumsum(np.array(piece_counts, np.int64)[tile_numbers])))


def _follow_links(run: OpenRun, tiles: _Tiles) -> Array:
    """Return, for each piece, the piece at the end of its chain of links, which contains the maximum of the basin.

    The first entry is the background.
    """
    allocate, dtype = make_allocator(run.folder.path), np.int32 if tiles.num_pieces < 2**31 - 1 else np.int64
    link = allocate((tiles.num_pieces + 1,), dtype)
    for part in _split_into_slices(link):
        link[part] = np.arange(part.start, part.stop)
    offset_of_tile = np.zeros(run.plan.layout.total_groups, np.int64)
    offset_of_tile[tiles.numbers] = tiles.offsets[:-1]
    for number in tiles.numbers.tolist():
        with run.folder.read_arrays(f"links/{number}.npz") as links:
            link[offset_of_tile[number] + links["piece"]] = offset_of_tile[links["owner"]] + links["target"]
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


def _find_maxima(run: OpenRun, tiles: _Tiles, link: Array) -> _Maxima:
    pieces, positions, peak_keys = [link[:0]], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for _number, part, archive in tiles.open_archives(run):
        properties, piece_numbers = archive["properties"], np.arange(part.start, part.stop)
        own_maxima = np.flatnonzero(link[part] == piece_numbers)
        pieces.append(piece_numbers[own_maxima].astype(link.dtype))
        positions.append(properties[own_maxima, 0])
        peak_keys.append(properties[own_maxima, 3].astype(np.int32))
    piece, order = np.concatenate(pieces), np.concatenate(positions).argsort(kind="stable")
    basin = np.empty_like(piece)
    basin[order] = np.arange(len(order))
    return _Maxima(piece, basin, np.concatenate(peak_keys)[order])


def _number_basins(link: Array, maxima: _Maxima) -> None:
    """Replace each piece that contains a maximum with the number of its basin. The background becomes -1."""
    for part in _split_into_slices(link) if len(maxima.piece) else ():
        link[part] = maxima.basin[np.searchsorted(maxima.piece, link[part]).clip(max=len(maxima.piece) - 1)]
    link[0] = -1


def _sum_pieces(
    run: OpenRun,
    tiles: _Tiles,
    basin_of_piece: Array,
    write_passes: Callable[[NDArray[np.integer], NDArray[np.int32]], None],
) -> _Sums:
    """Return sums over the pieces of each basin.

    write_passes  called once for each tile with the basins [E, 2] and the keys [E] of its passes
    """
    num_basins = int(basin_of_piece.max(initial=-1)) + 1
    voxels, stack_voxels, foreground = np.zeros((3, num_basins), np.int64)
    sums = _Sums(voxels, stack_voxels, foreground, np.zeros(num_basins, np.bool_))
    for _number, part, archive in tiles.open_archives(run):
        basins, properties, passes = basin_of_piece[part], archive["properties"], archive["passes"]
        np.add.at(sums.voxels, basins, properties[:, 1])
        if "stack_voxels" in archive:
            np.add.at(sums.stack_voxels, basins, archive["stack_voxels"])
        np.add.at(sums.foreground, basins, properties[:, 2])
        sums.touches_face[basins[archive["at_faces"].astype(np.int64) - 1]] = True
        write_passes(basins[passes[:, :2] - 1], passes[:, 2])
    return sums


def _select_shallow_passes(
    basins: NDArray[np.integer], keys: NDArray[np.int32], heights: torch.Tensor, persistence: Persistence
) -> bytes:
    """Return the shallow passes of a tile as the bytes of an array of `_PASS`."""
    basin_numbers, pairs = np.unique(basins, return_inverse=True)
    first_basins, second_basins = (torch.from_numpy(side.astype(np.int64)) for side in pairs.reshape(-1, 2).T)
    empty, basin_numbers = torch.zeros(0, dtype=torch.int64), basin_numbers.astype(np.int64)
    passes = Passes(first_basins, second_basins, compute_heights(torch.from_numpy(np.ascontiguousarray(keys))))
    tile_basins = Basins(empty, empty, heights[torch.from_numpy(basin_numbers)], empty, empty, passes)
    first, second, height = (column.numpy() for column in find_shallow_passes(tile_basins, persistence))
    shallow_passes = np.empty(len(height), _PASS)
    shallow_passes["height"], shallow_passes["first"], shallow_passes["second"] = (
        height,
        basin_numbers[first],
        basin_numbers[second],
    )
    return shallow_passes.tobytes()


def _sort_descending(passes: Array) -> Iterator[Array]:
    """Yield passes in descending order of height, about `PASSES_PER_STEP` at a time.

    Passes of equal height are sorted by their basins. Several tiles may have passes between the same two basins. The
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


def label_tile(run: OpenRun, tile: int, box: tuple[slice, slice, slice]) -> Array:
    """Return the labels in a part of a tile. `box` is relative to the tile."""
    tiles, offsets = run.folder.read_array("offsets.npy")
    labels = run.folder.read_array("labels.npy")
    index = int(np.searchsorted(tiles, tile))
    pieces = read_pixels(run, tile, box)
    if index == len(tiles) or tiles[index] != tile:
        return np.zeros(pieces.shape, labels.dtype)
    piece_labels = np.array(labels[offsets[index] : offsets[index] + int(pieces.max(initial=0)) + 1])
    # The entry before piece 1 belongs to another tile.
    piece_labels[0] = 0
    result: Array = piece_labels[pieces]
    return result


def link_tile(run: OpenRun, tile: int) -> dict[str, Any]:
    """Find the pieces of adjacent tiles in which paths from this tile continue.

    Returns the fields of the block's record. Writes an archive of int32 arrays [N]: `piece` in this tile, the adjacent
    tile `owner`, and its piece `target`.
    """
    if not run.folder.read_record("tile", tile).get("pieces"):
        return {"links": 0}
    with run.folder.read_arrays(f"tiles/{tile}.npz") as archive:
        positions = np.array(np.unravel_index(archive["properties"][:, 0], run.plan.layout.size))
    tile_bounds = run.plan.layout.tile_bounds
    tile_index = [
        np.searchsorted(axis, voxel, side="right") - 1 for axis, voxel in zip(tile_bounds, positions, strict=True)
    ]
    owner_tiles = np.ravel_multi_index(tile_index, run.plan.layout.num_groups)
    pieces = np.flatnonzero(owner_tiles != tile)
    owner_tiles, positions = owner_tiles[pieces], positions[:, pieces]
    target_pieces = np.zeros(len(pieces), np.int32)
    for other_tile in np.unique(owner_tiles).tolist():
        is_in_other = owner_tiles == other_tile
        target_pieces[is_in_other] = _read_pieces_at(run, tile, other_tile, positions[:, is_in_other])
    links = {"piece": pieces + 1, "owner": owner_tiles, "target": target_pieces}
    run.folder.write_arrays(f"links/{tile}.npz", {name: column.astype(np.int32) for name, column in links.items()})
    return {"links": len(pieces)}


def _read_pieces_at(run: OpenRun, tile: int, other_tile: int, positions: NDArray[np.int64]) -> Array:
    """Return the pieces of an adjacent tile at positions [3, N] in the face that touches this tile."""
    layout = run.plan.layout
    position, neighbor_position = layout.get_position(tile), layout.get_position(other_tile)
    axis = next(axis for axis in range(3) if position[axis] != neighbor_position[axis])
    with run.folder.read_arrays(f"tiles/{other_tile}.npz") as archive:
        face: Array = archive[f"face-{axis}-{int(neighbor_position[axis] < position[axis])}"]
    tile_positions = positions - np.array(get_first_voxel(layout.get_tile(other_tile)))[:, None]
    face_positions: Sequence[NDArray[np.int64]] = [tile_positions[index] for index in range(3) if index != axis]
    return face[face_positions[0], face_positions[1]]
