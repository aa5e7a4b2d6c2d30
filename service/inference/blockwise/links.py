"""Links of the pieces of a tile whose paths go on in tiles beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.types import Array
from service.inference.blockwise.layout import firsts
from service.inference.blockwise.run_folder import OpenRun


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
