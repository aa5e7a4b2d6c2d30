"""Join the watershed pieces of all tiles into objects.

A region consists of consecutive tiles. Workers join the pieces of regions in parallel, so the process that joins all
regions reads few files, and only one entry for all pieces of a region that belong to the same basin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from service.core.types import Array
from service.inference.blockwise.layout import TILES_PER_REGION, get_first_voxel
from service.inference.blockwise.tiles import make_decoding_spec, read_region_pieces
from service.inference.decoding.instances import choose_objects
from service.inference.decoding.labels import number_objects
from service.inference.decoding.pieces import Pieces, WatershedParameters, describe_objects, find_objects, join_pieces
from service.inference.decoding.postprocessing import require_instances

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import OpenRun

Links = NDArray[np.int64]
"""Pieces that continue in other tiles, the tiles where they continue, and the numbers of the pieces there, [3, L]."""


def join_region(run: OpenRun, region: int) -> dict[str, Any]:
    """Join the pieces of the tiles of a region. Return the fields of the block's record.

    Writes an archive of `Pieces` and of the `links` to tiles of other regions, and an array with the joined piece of
    every piece of the tiles, int32.
    """
    tiles = run.plan.layout.list_tiles(region)
    counts = [run.folder.read_record("tile", tile).get("pieces", 0) for tile in tiles]
    offsets = np.append(0, np.cumsum(counts, dtype=np.int64))
    parts, tile_links = list[Pieces](), [np.zeros((3, 0), np.int64)]
    for tile, offset, count in zip(tiles, offsets, counts, strict=False):
        if count:
            part, _ = _read_pieces(run, f"tiles/{tile}.npz")
            parts.append(part)
            tile_links.append(_find_links(run, tile, part.position) + np.array([[offset], [0], [0]]))
    links, link = np.concatenate(tile_links, 1), np.arange(offsets[-1])
    is_inner = np.isin(links[1], tiles)
    inner_links, outer_links = links[:, is_inner], links[:, ~is_inner]
    link[inner_links[0]] = offsets[inner_links[1] - tiles.start] + inner_links[2]
    # Pieces that continue in the same piece of another region belong to the same basin.
    _, first, group = np.unique(outer_links[1] << 32 | outer_links[2], return_index=True, return_inverse=True)
    link[outer_links[0]] = outer_links[0, first][group]
    joined, number = join_pieces(Pieces.concatenate(parts), link, _get_parameters(run))
    outer_links = np.stack((number[outer_links[0, first]], *outer_links[1:, first]))
    run.folder.write_arrays(f"regions/{region}.npz", joined._asdict() | {"links": outer_links})
    run.folder.write_array(f"regions/{region}.npy", number.astype(np.int32))
    return {"pieces": len(link), "roots": len(joined.key), "offsets": offsets.tolist()}


def join_regions(run: OpenRun) -> dict[str, Any]:
    """Write the objects and the object of each piece of all regions. Return the fields of the block's record.

    `labels.npy` contains the number of the object of each piece, or 0 if the object was removed; `offsets.npy` the
    number of pieces before each region; `candidates.npy` the objects that the decoder does not remove, float64 [4, N]:
    number of voxels, confidence, peak, and number of voxels in the stack if the stack was resampled.
    """
    counts = [run.folder.read_record("region", region)["roots"] for region in range(run.plan.layout.num_regions)]
    offsets = np.append(0, np.cumsum(counts, dtype=np.int64))
    parameters, decoding = _get_parameters(run), require_instances(make_decoding_spec(run))
    found, object_of_piece = find_objects(*_read_regions(run, offsets), parameters)
    objects, diameter = describe_objects(found, parameters), run.spec.input.diameter or math.inf
    is_kept = choose_objects(decoding, objects, found.touches_face, diameter, run.plan.layout.size)
    candidates = (objects.voxel_counts, objects.confidence, objects.peaks, found.sums[3])
    run.folder.write_array("candidates.npy", np.stack(candidates)[:, is_kept])
    run.folder.write_array("labels.npy", number_objects(is_kept)[1:][object_of_piece])
    run.folder.write_array("offsets.npy", offsets[:-1])
    return {"objects": int(np.count_nonzero(is_kept)), "pieces": int(offsets[-1])}


def _read_regions(run: OpenRun, offsets: NDArray[np.int64]) -> tuple[Pieces, NDArray[np.int64]]:
    """Return the pieces of all regions, and their links, given the number of the first piece of each region."""
    parts, link = list[Pieces](), np.arange(offsets[-1])
    for region in np.flatnonzero(np.diff(offsets)).tolist():
        part, (pieces, tiles, targets) = _read_pieces(run, f"regions/{region}.npz")
        parts.append(part)
        for target_region in np.unique(tiles // TILES_PER_REGION).tolist():
            is_in_region = tiles // TILES_PER_REGION == target_region
            numbers = read_region_pieces(run, target_region, tiles[is_in_region], targets[is_in_region])
            link[offsets[region] + pieces[is_in_region]] = offsets[target_region] + numbers
    return Pieces.concatenate(parts), link


def _get_parameters(run: OpenRun) -> WatershedParameters:
    return WatershedParameters.of_model(run.spec, require_instances(make_decoding_spec(run)))


def _read_pieces(run: OpenRun, name: str) -> tuple[Pieces, Links]:
    """Read an archive of pieces, and their links if it contains any."""
    with run.folder.read_arrays(name) as archive:
        links = archive["links"] if "links" in archive else np.zeros((3, 0), np.int64)
        return Pieces(*(archive[field] for field in Pieces._fields)), links


def _find_links(run: OpenRun, tile: int, positions: NDArray[np.int64]) -> Links:
    """Return the links of a tile to other tiles. `positions` [P] are those of its pieces."""
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
    return np.stack([pieces, owner_tiles, target_pieces])


def _read_pieces_at(run: OpenRun, tile: int, other_tile: int, positions: NDArray[np.int64]) -> Array:
    """Return the pieces of an adjacent tile at positions [3, N] in the face that touches this tile."""
    layout = run.plan.layout
    position, neighbor_position = layout.get_position(tile), layout.get_position(other_tile)
    axis = next(axis for axis in range(3) if position[axis] != neighbor_position[axis])
    with run.folder.read_arrays(f"tiles/{other_tile}.npz") as archive:
        face: Array = archive[f"face-{axis}-{int(neighbor_position[axis] < position[axis])}"]
    tile_positions = positions - np.array(get_first_voxel(layout.get_tile(other_tile)))[:, None]
    y, x = (tile_positions[index] for index in range(3) if index != axis)
    result: Array = face[y, x].astype(np.int64) - 1
    return result
