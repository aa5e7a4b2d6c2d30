"""Join the pieces of all tiles to objects, and number these."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from service.core.volume import Array, Objects, label_dtype
from service.inference.blockwise.run_folder import OpenRun
from service.inference.blockwise.tiles import decoding_spec
from service.inference.decoding.basin_merging import Persistence, merge_shallow_basins
from service.inference.decoding.instances import least_voxels
from service.inference.decoding.watershed import PROBABILITY_ONE, Basins, Passes, heights_of_keys
from service.models.spec import Instances


class _Pieces(NamedTuple):
    """Pieces of all tiles, one behind the other; number 0 is the background.

    tiles, offsets  numbers of the tiles that have pieces, and how many pieces come before each
    facts     int64 [P + 1, 4], as of `BlockPieces`
    passes    int64 [E, 2] and int32 [E]: numbers of pieces, and key
    at_faces  int64 [F]: pieces with a voxel at a face of the volume
    """

    tiles: list[int]
    offsets: NDArray[np.int64]
    facts: NDArray[np.int64]
    passes: NDArray[np.int64]
    keys: NDArray[np.int32]
    at_faces: NDArray[np.int64]


def join_tiles(run: OpenRun) -> dict[str, Any]:
    """Write the label of every piece of every tile; return facts for the record."""
    spec = decoding_spec(run)
    decoding = spec.decoding
    assert isinstance(decoding, Instances)  # noqa: S101 - no other model has labels
    pieces = _gather(run)
    persistence = Persistence(decoding.persistence, logits=spec.activation == "sigmoid")
    basin_of, maxima = _find_basins(run, pieces)
    basins = _sum_up(pieces, basin_of, maxima)
    group = merge_shallow_basins(basins, persistence)
    found = int(group.max(initial=-1)) + 1
    voxels, foreground = np.zeros((2, found), np.int64)
    np.add.at(voxels, group, basins.voxels.numpy())
    np.add.at(foreground, group, basins.foreground.numpy())
    peaks = np.full(found, -np.inf)
    np.fmax.at(peaks, group, persistence.distance(basins.peaks).numpy())
    kept = voxels >= max(decoding.minimum_size, 1)
    if decoding.border == "drop":
        kept[group[basin_of[pieces.at_faces]]] = False
    objects = Objects.from_sums(voxels, foreground / PROBABILITY_ONE, peaks)
    chosen = objects.select(kept)
    whole = least_voxels(spec.input.diameter or math.inf, decoding, chosen, run.plan.layout.size)
    kept &= (objects.confidence >= decoding.min_confidence) & (objects.voxels >= whole)
    count = int(np.count_nonzero(kept))
    numbers = np.where(kept, kept.cumsum(), 0)
    labels = np.append(numbers[group], 0)[basin_of].astype(label_dtype(count))
    run.folder.write_array("labels.npy", labels)
    run.folder.write_array("offsets.npy", np.array([pieces.tiles, pieces.offsets], np.int64).reshape(2, -1))
    final = objects.select(kept)
    run.folder.write_array("objects.npy", np.stack([final.voxels, final.confidence, final.peaks]))
    return {"objects": count, "pieces": len(pieces.facts) - 1}


def _gather(run: OpenRun) -> _Pieces:
    """Read what is known of the pieces of every tile."""
    tiles, offsets, facts = list[int](), [0], [np.full((1, 4), -1, np.int64)]
    passes, keys, at_faces = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for tile in range(run.plan.layout.count):
        path = run.folder.path / f"tiles/{tile}.npz"
        if run.folder.read_record("tile", tile)["empty"]:
            continue
        with np.load(path) as known:
            if not len(known["facts"]):
                continue
            before = offsets[-1]
            offsets.append(before + len(known["facts"]))
            tiles.append(tile)
            facts.append(known["facts"])
            passes.append(known["passes"][:, :2].astype(np.int64) + before)
            keys.append(known["passes"][:, 2])
            at_faces.append(known["at_faces"].astype(np.int64) + before)
    return _Pieces(
        tiles,
        np.array(offsets[:-1], np.int64),
        np.concatenate(facts),
        np.concatenate(passes),
        np.concatenate(keys),
        np.concatenate(at_faces),
    )


def _find_basins(run: OpenRun, pieces: _Pieces) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the basin of every piece, -1 for the background, and the piece with the maximum of every basin."""
    layout = run.plan.layout
    place = pieces.facts[:, 0]
    link = np.arange(len(place))
    z, y, x = np.unravel_index(np.maximum(place, 0), layout.size)
    columns, rows = len(layout.edges[2]) - 1, len(layout.edges[1]) - 1
    at = [np.searchsorted(edges, axis, side="right") - 1 for edges, axis in zip(layout.edges, (z, y, x), strict=True)]
    owner = (at[0] * rows + at[1]) * columns + at[2]
    own = np.repeat(pieces.tiles, np.diff(np.append(pieces.offsets, len(place) - 1)))
    abroad = np.flatnonzero(np.append(-1, own) != owner)
    abroad = abroad[abroad > 0]
    abroad = abroad[np.argsort(owner[abroad], kind="stable")]
    offset_of = dict(zip(pieces.tiles, pieces.offsets.tolist(), strict=True))
    for tile in np.unique(owner[abroad]).tolist():
        first, end = np.searchsorted(owner[abroad], (tile, tile + 1))
        here = abroad[first:end]
        origin = [start for start, _ in layout.tile(tile)]
        numbers: Array = run.folder.read_array(f"tiles/{tile}.npy")
        local = numbers[z[here] - origin[0], y[here] - origin[1], x[here] - origin[2]]
        link[here] = local.astype(np.int64) + offset_of[tile]
    while not np.array_equal(further := link[link], link):
        link = further
    maxima = np.flatnonzero(link == np.arange(len(link)))[1:]
    maxima = maxima[place[maxima].argsort(kind="stable")]
    basin = np.full(len(link), -1)
    basin[maxima] = np.arange(len(maxima))
    return basin[link], maxima


def _sum_up(pieces: _Pieces, basin_of: NDArray[np.int64], maxima: NDArray[np.int64]) -> Basins:
    """Return the basins, without the piece of every voxel."""
    total = np.zeros((2, len(maxima) + 1), np.int64)
    np.add.at(total[0], basin_of[1:], pieces.facts[1:, 1])
    np.add.at(total[1], basin_of[1:], pieces.facts[1:, 2])
    tops = torch.from_numpy(pieces.facts[maxima, 3].astype(np.int32))
    one, other = (torch.from_numpy(basin_of[side]) for side in pieces.passes.T)
    passes = Passes(one, other, heights_of_keys(torch.from_numpy(pieces.keys)))
    nothing = torch.zeros((0, 0, 0), dtype=torch.int32)
    sums = (torch.from_numpy(total[0, :-1].copy()), torch.from_numpy(total[1, :-1].copy()))
    return Basins(torch.from_numpy(basin_of), nothing, heights_of_keys(tops), *sums, passes)


def label_tile(run: OpenRun, tile: int, box: tuple[slice, slice, slice]) -> Array:
    """Return the labels of a part of a tile, `box` in the tile."""
    tiles, offsets = run.folder.read_array("offsets.npy")
    labels = run.folder.read_array("labels.npy")
    at = int(np.searchsorted(tiles, tile))
    pieces = np.asarray(run.folder.read_array(f"tiles/{tile}.npy")[box])
    if at == len(tiles) or tiles[at] != tile:
        return np.zeros(pieces.shape, labels.dtype)
    numbers = np.array(labels[offsets[at] : offsets[at] + int(pieces.max(initial=0)) + 1])
    # The piece before that of number 1 belongs to another tile.
    numbers[0] = 0
    found: Array = numbers[pieces]
    return found
