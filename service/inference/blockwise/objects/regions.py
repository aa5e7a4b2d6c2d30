"""Join the watershed pieces of the tiles of a region, and find the pieces in which their paths continue.

A region consists of consecutive tiles. Workers join regions in parallel, so the process that joins all regions reads
few files, and only one entry for all pieces of a region that belong to the same basin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.core.types import Array
from service.inference.blockwise.layout import get_first_voxel
from service.inference.blockwise.tiles import make_decoding_spec
from service.inference.decoding.basin_merging import Persistence
from service.inference.decoding.postprocessing import require_instances
from service.inference.decoding.watershed import compute_heights

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import OpenRun


class RegionPieces(NamedTuple):
    """Joined pieces of a region, numbered from 0.

    position      flat index in the volume of the voxel at which the ascending paths of a piece end, int64 [R]
    key           key of this voxel, int32 [R]
    sums          for each piece, the number of voxels, the sum of their foreground probabilities and, if the stack was
                  resampled, the number of voxels in the stack, int64 [3, R]
    touches_face  whether a piece touches a face of the volume, bool [R]
    passes        pairs of pieces that touch near their peaks, and the key of their highest pass, int32 [E, 3]
    links         pieces that continue in other regions, the tiles where they continue, and the numbers of the pieces in
                  these tiles, int64 [3, L]
    """

    position: NDArray[np.int64]
    key: NDArray[np.int32]
    sums: NDArray[np.int64]
    touches_face: NDArray[np.bool_]
    passes: NDArray[np.int32]
    links: NDArray[np.int64]


def join_region(run: OpenRun, region: int) -> dict[str, Any]:
    """Join the pieces of a region. Return the fields of the block's record.

    Writes an archive of `RegionPieces`, and an array with the joined piece of every piece of the tiles, int32.
    """
    tiles = run.plan.layout.list_tiles(region)
    counts = [run.folder.read_record("tile", tile).get("pieces", 0) for tile in tiles]
    offsets = [0, *itertools.accumulate(counts)]
    columns = _Columns(*(list[Array]() for _ in _Columns._fields))
    for tile, offset, count in zip(tiles, offsets, counts, strict=False):
        if count:
            _collect_tile(run, tile, offset, columns)
    link, properties, stack_voxels, touches_face, passes, links = (
        np.concatenate([empty, *parts], -1) for empty, parts in zip(_Columns.make_empty(), columns, strict=True)
    )
    inner = np.isin(links[1], tiles)
    link[links[0, inner]] = np.array(offsets)[links[1, inner] - tiles.start] + links[2, inner] - 1
    while not np.array_equal(next_link := link[link], link):
        link = next_link
    roots = np.flatnonzero(link == np.arange(len(link)))
    number = np.zeros(len(link), np.int32)
    number[roots] = np.arange(len(roots))
    number = number[link]
    sums = np.zeros((3, len(roots)), np.int64)
    for total, values in zip(sums, (properties[1], properties[2], stack_voxels), strict=True):
        np.add.at(total, number, values)
    is_at_face = np.zeros(len(roots), bool)
    is_at_face[number[touches_face]] = True
    position, key = properties[0, roots], properties[3, roots].astype(np.int32)
    joined_passes = _select_passes(run, number[passes[:2]], passes[2].astype(np.int32), key)
    outer_links = np.stack([number[links[0, ~inner]], *links[1:, ~inner]])
    pieces = RegionPieces(position, key, sums, is_at_face, joined_passes, outer_links)
    run.folder.write_arrays(f"regions/{region}.npz", pieces._asdict())
    run.folder.write_array(f"regions/{region}.npy", number)
    return {"pieces": len(link), "roots": len(roots), "passes": len(joined_passes), "offsets": offsets}


class _Columns(NamedTuple):
    """Arrays of the tiles of a region; pieces are numbered from 0.

    link           number of each piece
    properties     as in `BlockPieces`, but transposed
    stack_voxels   number of voxels of each piece in the stack, or 0 if the stack was not resampled
    touches_face   pieces that touch a face of the volume
    passes         as in `BlockPieces`, but transposed
    links          as in `RegionPieces`, but of all tiles
    """

    link: list[Array]
    properties: list[Array]
    stack_voxels: list[Array]
    touches_face: list[Array]
    passes: list[Array]
    links: list[Array]

    @classmethod
    def make_empty(cls) -> Sequence[NDArray[np.int64]]:
        """Return an empty array for each column."""
        return [np.zeros(shape, np.int64) for shape in ((0,), (4, 0), (0,), (0,), (3, 0), (3, 0))]


def _collect_tile(run: OpenRun, tile: int, offset: int, columns: _Columns) -> None:
    """Append the arrays of a tile whose first piece has the number `offset` in its region."""
    with run.folder.read_arrays(f"tiles/{tile}.npz") as archive:
        properties, passes = archive["properties"], archive["passes"]
        count = len(properties)
        columns.link.append(np.arange(offset, offset + count))
        columns.properties.append(properties.T)
        is_resampled = "stack_voxels" in archive
        columns.stack_voxels.append(archive["stack_voxels"] if is_resampled else np.zeros(count, np.int64))
        columns.touches_face.append(archive["at_faces"].astype(np.int64) + offset - 1)
    columns.passes.append(
        np.stack([passes[:, 0] + offset - 1, passes[:, 1] + offset - 1, passes[:, 2]]).astype(np.int64)
    )
    columns.links.append(_find_links(run, tile, properties[:, 0], offset))


def _select_passes(
    run: OpenRun, pairs: NDArray[np.int32], keys: NDArray[np.int32], peak_keys: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the highest pass of each pair of pieces, int32 [E, 3], without passes that are too deep to merge a pair.

    The peak of a basin is at least as high as the voxel where a path leaves the region. If a pass is too deep below
    this voxel, it is too deep below the peak.
    """
    persistence = Persistence.of_model(run.spec, require_instances(make_decoding_spec(run)))
    heights, peaks = (
        persistence.to_distances(compute_heights(torch.from_numpy(values))).numpy() for values in (keys, peak_keys)
    )
    first, second = pairs.min(0), pairs.max(0)
    is_shallow = (first != second) & (np.minimum(peaks[first], peaks[second]) - heights < persistence.depth)
    pair_numbers, inverse = np.unique(
        first[is_shallow].astype(np.int64) * len(peak_keys) + second[is_shallow], return_inverse=True
    )
    highest_keys = np.full(len(pair_numbers), np.iinfo(np.int32).min, np.int32)
    np.maximum.at(highest_keys, inverse, keys[is_shallow])
    num_pieces = max(len(peak_keys), 1)
    return np.stack([pair_numbers // num_pieces, pair_numbers % num_pieces, highest_keys], 1).astype(np.int32)


def _find_links(run: OpenRun, tile: int, positions: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
    """Return the links of a tile to other tiles, as in `RegionPieces`. `positions` [P] are those of its pieces."""
    layout = run.plan.layout
    voxels = np.array(np.unravel_index(positions, layout.size))
    tile_index = [
        np.searchsorted(axis, voxel, side="right") - 1 for axis, voxel in zip(layout.tile_bounds, voxels, strict=True)
    ]
    owner_tiles = np.ravel_multi_index(tile_index, layout.num_groups)
    pieces = np.flatnonzero(owner_tiles != tile)
    owner_tiles, voxels = owner_tiles[pieces], voxels[:, pieces]
    target_pieces = np.zeros(len(pieces), np.int64)
    for other_tile in np.unique(owner_tiles).tolist():
        is_in_other = owner_tiles == other_tile
        target_pieces[is_in_other] = _read_pieces_at(run, tile, other_tile, voxels[:, is_in_other])
    return np.stack([pieces + offset, owner_tiles, target_pieces])


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
