"""Links of the pieces of tiles whose paths go on in others; and the joining of all pieces to numbered objects.

What is kept of a piece is one number, in a mapped file where there are many; all else is read tile by tile.
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
from service.core.types import Array, Objects, label_dtype
from service.inference.blockwise.layout import firsts
from service.inference.blockwise.tiles import decoding_spec, read_pixels
from service.inference.decoding.basin_merging import MergeForest, Persistence, find_shallow_passes
from service.inference.decoding.instances import least_confidence, least_voxels
from service.inference.decoding.labels import gather_objects
from service.inference.decoding.steering import minimum_voxels, require_instances
from service.inference.decoding.watershed import Basins, Passes, heights_of_keys

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import OpenRun
    from service.models.spec import Instances

# Pieces that are worked on at a time, and passes, which as Python's numbers take some 100 bytes each.
PIECES, PASSES = 2**20, 2**20

# Shallow pass between two basins, the lower number first: its distance, as of `ShallowPasses`.
_PASS = np.dtype([("height", np.float64), ("first", np.int64), ("second", np.int64)])


class _Tiles(NamedTuple):
    """Tiles that have pieces, which are numbered one tile behind the other; number 0 is the background.

    numbers  of these tiles
    offsets  how many pieces come before each, and their number in all
    """

    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return int(self.offsets[-1])

    def open(self, run: OpenRun) -> Iterator[tuple[int, slice, NpzFile]]:
        """Yield each tile, where its pieces are among all with the background, and what is known of them."""
        for number, (first, end) in zip(self.numbers.tolist(), itertools.pairwise(self.offsets.tolist()), strict=True):
            with run.folder.read_arrays(f"tiles/{number}.npz") as known:
                yield number, slice(first + 1, end + 1), known


class _Maxima(NamedTuple):
    """Pieces that have the maximum of a basin, in their order; arrays [R].

    piece  number
    basin  number of the basin: these are in the order of the places of their maxima
    top    int32, key at the maximum of each basin
    """

    piece: NDArray[np.integer]
    basin: NDArray[np.integer]
    top: NDArray[np.int32]


class _Sums(NamedTuple):
    """Sums over the voxels of basins, int64 [R], and whether each has a voxel at a face of the volume.

    `stack_voxels` are those of the stack, where that was resampled.
    """

    voxels: NDArray[np.int64]
    stack_voxels: NDArray[np.int64]
    foreground: NDArray[np.int64]
    at_face: NDArray[np.bool_]


def join_tiles(run: OpenRun) -> dict[str, Any]:
    """Write the label of every piece of every tile; return facts for the record."""
    spec = decoding_spec(run)
    decoding = require_instances(spec)
    tiles = _list_tiles(run)
    persistence = Persistence(decoding.persistence, logits=spec.activation == "sigmoid")
    basin_of = _follow_links(run, tiles)
    maxima = _find_maxima(run, tiles, basin_of)
    _number_basins(basin_of, maxima)
    heights = heights_of_keys(torch.from_numpy(maxima.top))
    forest = MergeForest(persistence.distance(heights).numpy(), persistence.depth)
    with tempfile.TemporaryFile(dir=run.folder.path) as shallow:

        def keep(basins: NDArray[np.integer], keys: NDArray[np.int32]) -> None:
            shallow.write(_shallow(basins, keys, heights, persistence))

        sums = _sum_up(run, tiles, basin_of, keep)
        passes = shallow.tell() // _PASS.itemsize
        for part in _from_highest(np.memmap(shallow, _PASS) if passes else np.zeros(0, _PASS)):
            forest.join(part["first"], part["second"], part["height"])
    group = np.unique(forest.highest(), return_inverse=True)[1]
    objects, kept = _choose_objects(run, decoding, group, sums, persistence.distance(heights).numpy())
    count = int(np.count_nonzero(kept))
    numbers = np.where(kept, kept.cumsum(), 0)
    # That of the background is the last.
    _write_labels(run, basin_of, np.append(numbers[group], 0).astype(label_dtype(count)))
    run.folder.write_array("offsets.npy", np.array([tiles.numbers, tiles.offsets[:-1]]))
    final = objects.select(kept)
    run.folder.write_array("objects.npy", np.stack([final.voxels, final.confidence, final.peaks]))
    return {"objects": count, "pieces": tiles.pieces, "basins": len(heights), "passes": passes}


def _choose_objects(
    run: OpenRun, decoding: Instances, group: NDArray[np.int64], sums: _Sums, heights: NDArray[np.float64]
) -> tuple[Objects, NDArray[np.bool_]]:
    """Return the objects, and which of them get a label.

    group, heights  of each basin: the object that it belongs to, and the distance at its maximum
    """
    objects = gather_objects(group, sums.voxels, sums.foreground, heights)
    kept = objects.voxels >= max(decoding.minimum_size, 1)
    if decoding.border == "drop":
        kept[group[sums.at_face]] = False
    chosen = objects.select(kept)
    whole = least_voxels(run.spec.input.diameter or math.inf, decoding, chosen, run.plan.layout.size)
    kept &= (objects.confidence >= least_confidence(decoding, chosen)) & (objects.voxels >= whole)
    if run.plan.layout.size != run.plan.size:
        on_stack = np.zeros(len(objects), np.int64)
        np.add.at(on_stack, group, sums.stack_voxels)
        kept &= on_stack >= max(minimum_voxels(run.plan.options.steering, run.plan), 1)
    return objects, kept


def _list_tiles(run: OpenRun) -> _Tiles:
    counts = [run.folder.read_record("tile", tile).get("pieces", 0) for tile in range(run.plan.layout.count)]
    numbers = np.flatnonzero(counts)
    return _Tiles(numbers, np.append(0, np.cumsum(np.array(counts, np.int64)[numbers])))


def _follow_links(run: OpenRun, tiles: _Tiles) -> Array:
    """Return for every piece, and before them for the background, the piece with the maximum that its path leads to."""
    allocate, width = make_allocator(run.folder.path), np.int32 if tiles.pieces < 2**31 - 1 else np.int64
    link = allocate((tiles.pieces + 1,), width)
    for part in _parts(link):
        link[part] = np.arange(part.start, part.stop)
    offset_of = np.zeros(run.plan.layout.count, np.int64)
    offset_of[tiles.numbers] = tiles.offsets[:-1]
    for number in tiles.numbers.tolist():
        with run.folder.read_arrays(f"links/{number}.npz") as links:
            link[offset_of[number] + links["piece"]] = offset_of[links["owner"]] + links["target"]
    is_settled = False
    while not is_settled:
        is_settled = True
        for part in _parts(link):
            further = link[link[part]]
            is_settled &= np.array_equal(further, link[part])
            link[part] = further
    return link


def _parts(pieces: Array) -> Iterator[slice]:
    for first in range(0, len(pieces), PIECES):
        yield slice(first, min(first + PIECES, len(pieces)))


def _find_maxima(run: OpenRun, tiles: _Tiles, link: Array) -> _Maxima:
    pieces, places, tops = [link[:0]], [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for _number, part, known in tiles.open(run):
        facts, own = known["facts"], np.arange(part.start, part.stop)
        here = np.flatnonzero(link[part] == own)
        pieces.append(own[here].astype(link.dtype))
        places.append(facts[here, 0])
        tops.append(facts[here, 3].astype(np.int32))
    piece, order = np.concatenate(pieces), np.concatenate(places).argsort(kind="stable")
    basin = np.empty_like(piece)
    basin[order] = np.arange(len(order))
    return _Maxima(piece, basin, np.concatenate(tops)[order])


def _number_basins(link: Array, maxima: _Maxima) -> None:
    """Replace the piece with the maximum by the number of the basin; that of the background is -1."""
    for part in _parts(link) if len(maxima.piece) else ():
        link[part] = maxima.basin[np.searchsorted(maxima.piece, link[part]).clip(max=len(maxima.piece) - 1)]
    link[0] = -1


def _sum_up(
    run: OpenRun, tiles: _Tiles, basin_of: Array, keep: Callable[[NDArray[np.integer], NDArray[np.int32]], None]
) -> _Sums:
    """Sum up the pieces of all tiles; `keep` gets basins [E, 2] and keys [E] of the passes of one after the other."""
    count = int(basin_of.max(initial=-1)) + 1
    voxels, stack_voxels, foreground = np.zeros((3, count), np.int64)
    sums = _Sums(voxels, stack_voxels, foreground, np.zeros(count, np.bool_))
    for _number, part, known in tiles.open(run):
        here, facts, passes = basin_of[part], known["facts"], known["passes"]
        np.add.at(sums.voxels, here, facts[:, 1])
        if "stack_voxels" in known:
            np.add.at(sums.stack_voxels, here, known["stack_voxels"])
        np.add.at(sums.foreground, here, facts[:, 2])
        sums.at_face[here[known["at_faces"].astype(np.int64) - 1]] = True
        keep(here[passes[:, :2] - 1], passes[:, 2])
    return sums


def _shallow(
    basins: NDArray[np.integer], keys: NDArray[np.int32], heights: torch.Tensor, persistence: Persistence
) -> bytes:
    """Return the shallow ones among the passes of a tile, each a `_PASS`."""
    numbers, pairs = np.unique(basins, return_inverse=True)
    one, other = (torch.from_numpy(side.astype(np.int64)) for side in pairs.reshape(-1, 2).T)
    nothing, numbers = torch.zeros(0, dtype=torch.int64), numbers.astype(np.int64)
    passes = Passes(one, other, heights_of_keys(torch.from_numpy(np.ascontiguousarray(keys))))
    there = Basins(nothing, nothing, heights[torch.from_numpy(numbers)], nothing, nothing, passes)
    first, second, height = (column.numpy() for column in find_shallow_passes(there, persistence))
    found = np.empty(len(height), _PASS)
    found["height"], found["first"], found["second"] = height, numbers[first], numbers[second]
    return found.tobytes()


def _from_highest(passes: Array) -> Iterator[Array]:
    """Yield passes from the highest down, equal ones by their pairs, about `PASSES` at a time.

    A pair may be among those of several tiles. Its lower passes change nothing: either its basins are one by then, or
    the lower peak rises above them all the more.
    """
    sample = np.sort(passes["height"][:: max(len(passes) // 2**16, 1)])
    limits = sample[:: max(len(sample) * PASSES // max(len(passes), 1), 1)] if len(passes) > PASSES else sample[:0]
    limits = np.concatenate(([-np.inf], np.unique(limits), [np.inf]))
    for above, below in itertools.pairwise(limits[::-1]):
        parts = (passes[first : first + PASSES] for first in range(0, len(passes), PASSES))
        chosen = np.concatenate(
            [passes[:0], *(part[(part["height"] > below) & (part["height"] <= above)] for part in parts)]
        )
        yield chosen[np.lexsort((chosen["second"], chosen["first"], -chosen["height"]))]


def _write_labels(run: OpenRun, basin_of: Array, labels: Array) -> None:
    """Write the label of every piece, by those of the basins."""
    with run.folder.writing("labels.npy") as file:
        header = {"descr": labels.dtype.str, "fortran_order": False, "shape": basin_of.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for part in _parts(basin_of):
            file.write(labels[basin_of[part]].data)


def label_tile(run: OpenRun, tile: int, box: tuple[slice, slice, slice]) -> Array:
    """Return the labels of a part of a tile, `box` in the tile."""
    tiles, offsets = run.folder.read_array("offsets.npy")
    labels = run.folder.read_array("labels.npy")
    at = int(np.searchsorted(tiles, tile))
    pieces = read_pixels(run, tile, box)
    if at == len(tiles) or tiles[at] != tile:
        return np.zeros(pieces.shape, labels.dtype)
    numbers = np.array(labels[offsets[at] : offsets[at] + int(pieces.max(initial=0)) + 1])
    # The piece before that of number 1 belongs to another tile.
    numbers[0] = 0
    found: Array = numbers[pieces]
    return found


def link_tile(run: OpenRun, number: int) -> dict[str, Any]:
    """Find the pieces of other tiles in which paths of this one go on, and write them; return facts for the record.

    They are an archive of int32 [N]: `piece` of this tile, the tile that is its `owner`, and `target`, a piece there.
    """
    if not run.folder.read_record("tile", number).get("pieces"):
        return {"links": 0}
    with run.folder.read_arrays(f"tiles/{number}.npz") as known:
        place = np.array(np.unravel_index(known["facts"][:, 0], run.plan.layout.size))
    edges = run.plan.layout.edges
    at = [np.searchsorted(axis, voxel, side="right") - 1 for axis, voxel in zip(edges, place, strict=True)]
    owner = np.ravel_multi_index(at, run.plan.layout.groups)
    piece = np.flatnonzero(owner != number)
    owner, place = owner[piece], place[:, piece]
    target = np.zeros(len(piece), np.int32)
    for other in np.unique(owner).tolist():
        here = owner == other
        target[here] = _pieces_at(run, number, other, place[:, here])
    links = {"piece": piece + 1, "owner": owner, "target": target}
    run.folder.write_arrays(f"links/{number}.npz", {name: each.astype(np.int32) for name, each in links.items()})
    return {"links": len(piece)}


def _pieces_at(run: OpenRun, number: int, other: int, place: NDArray[np.int64]) -> Array:
    """Return the pieces of another tile at places [3, N] that touch this one: they lie in one of its faces."""
    layout = run.plan.layout
    here, there = layout.place(number), layout.place(other)
    axis = next(axis for axis in range(3) if here[axis] != there[axis])
    with run.folder.read_arrays(f"tiles/{other}.npz") as known:
        face: Array = known[f"face-{axis}-{int(there[axis] < here[axis])}"]
    inside = place - np.array(firsts(layout.tile(other)))[:, None]
    rest: Sequence[NDArray[np.int64]] = [inside[index] for index in range(3) if index != axis]
    return face[rest[0], rest[1]]
