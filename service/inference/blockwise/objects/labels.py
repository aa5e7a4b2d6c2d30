"""Fill the holes of objects, number the objects that remain, and look up the labels of a tile.

Workers find the components of the background of each tile. Components that continue in other tiles are then joined, as
in `fill_holes` for the whole volume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from service.core.types import Array
from service.inference.blockwise.layout import TILES_PER_REGION, get_lengths
from service.inference.blockwise.tiles import (
    count_stack_voxels,
    make_decoding_spec,
    read_pixels,
    read_region_pieces,
    take_faces,
    write_pixels,
)
from service.inference.decoding.filters.fill_holes import (
    add_contacts,
    find_neighbor_labels,
    find_open_components,
    label_groups,
    list_faces,
    number_background,
)
from service.inference.decoding.labels import number_objects
from service.inference.decoding.postprocessing import compute_min_voxels, require_instances

if TYPE_CHECKING:
    from service.inference.blockwise.layout import Layout
    from service.inference.blockwise.run_folder import OpenRun

_ALL = (slice(None), slice(None), slice(None))


def fills_holes(run: OpenRun) -> bool:
    """Return whether a run fills holes."""
    return run.plan.output == "labels" and require_instances(make_decoding_spec(run)).holes == "fill"


def _read_piece_labels(run: OpenRun, tile: int) -> Array:
    """Return the object number of each piece of a tile, preceded by 0 for the background."""
    labels, region = run.folder.read_array("labels.npy"), tile // TILES_PER_REGION
    num_pieces = run.folder.read_record("tile", tile).get("pieces", 0)
    piece_labels = np.zeros(num_pieces + 1, labels.dtype)
    if num_pieces:
        pieces = read_region_pieces(run, region, np.full(num_pieces, tile), np.arange(num_pieces))
        piece_labels[1:] = labels[run.folder.read_array("offsets.npy")[region] + pieces]
    return piece_labels


def _label_pixels(run: OpenRun, tile: int, box: tuple[slice, slice, slice], piece_labels: Array) -> Array:
    """Return the label of each voxel in a part of a tile, before holes are filled, given the labels of its pieces."""
    if len(piece_labels) > 1:
        result: Array = piece_labels[read_pixels(run, tile, box)]
        return result
    lengths = get_lengths(run.plan.layout.get_tile(tile))
    return np.zeros([len(range(*part.indices(n))) for part, n in zip(box, lengths, strict=True)], piece_labels.dtype)


def find_holes(run: OpenRun, tile: int) -> dict[str, Any]:
    """Find the components of the background of a tile. Return the fields of the block's record.

    Writes the component of each voxel, as by `number_background`, and an archive of the properties of the components
    from 0, which represents objects:

    lowest, highest  as returned by `find_neighbor_labels`, including labels in adjacent tiles
    is_open          whether each component touches a face of the volume
    stack_voxels     as returned by `count_stack_voxels`
    face-A-S         as returned by `take_faces`
    """
    layout, labels = run.plan.layout, _label_pixels(run, tile, _ALL, _read_piece_labels(run, tile))
    components, count = number_background(labels)
    faces = take_faces(components)
    neighbors = {(axis, side): _get_neighbor(layout, tile, axis, side) for axis in range(3) for side in (0, 1)}
    outer_faces = [face for face in list_faces(layout.size) if neighbors[face] is None]
    is_open = find_open_components(components, count, outer_faces)
    lowest, highest = find_neighbor_labels(labels, components, ~is_open)
    for (axis, side), neighbor in neighbors.items():
        if neighbor is not None:
            neighbor_labels = _read_face_labels(run, neighbor, axis, 1 - side)
            add_contacts(lowest, highest, faces[f"face-{axis}-{side}"], neighbor_labels)
    stack_voxels = count_stack_voxels(run, layout.get_tile(tile), components, count)
    arrays = {"lowest": lowest, "highest": highest, "is_open": is_open, "stack_voxels": stack_voxels}
    run.folder.write_arrays(f"holes/{tile}.npz", arrays | faces)
    return {"components": count + 1, **write_pixels(run, f"holes/{tile}.raw", components)}


def _get_neighbor(layout: Layout, tile: int, axis: int, side: int) -> int | None:
    """Return the tile next to a tile, before (side 0) or after it (side 1) along an axis; None if there is none."""
    position = list(layout.get_position(tile))
    position[axis] += 1 if side else -1
    return layout.get_number(position) if 0 <= position[axis] < layout.num_groups[axis] else None


def _read_face_labels(run: OpenRun, tile: int, axis: int, side: int) -> Array:
    """Return the object number of each voxel in the first (side 0) or last (side 1) layer of a tile along an axis."""
    piece_labels = _read_piece_labels(run, tile)
    if len(piece_labels) == 1:
        lengths = get_lengths(run.plan.layout.get_tile(tile))
        return np.zeros([n for index, n in enumerate(lengths) if index != axis], piece_labels.dtype)
    with run.folder.read_arrays(f"tiles/{tile}.npz") as archive:
        result: Array = piece_labels[archive[f"face-{axis}-{side}"]]
    return result


def _join_holes(run: OpenRun) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join the components of all tiles, and write the object number that fills each component; 0 if none does.

    Returns the object numbers of the filled components, and their numbers of stack voxels.
    """
    layout = run.plan.layout
    counts = [run.folder.read_record("holes", tile)["components"] for tile in range(layout.total_groups)]
    offsets = np.append(0, np.cumsum(counts))
    names = ("lowest", "highest", "is_open", "stack_voxels")
    columns: dict[str, list[Array]] = {name: [] for name in names}
    pairs = [np.zeros((2, 0), np.int64)]
    for tile in range(layout.total_groups):
        with run.folder.read_arrays(f"holes/{tile}.npz") as archive:
            for name, parts in columns.items():
                parts.append(archive[name])
            pairs += [
                _link_faces(run, archive, tile, axis, offsets)
                for axis in range(3)
                if _get_neighbor(layout, tile, axis, 1) is not None
            ]
    lowest, highest, is_open, stack_voxels = (np.concatenate(columns[name]) for name in names)
    group = label_groups(int(offsets[-1]), *np.concatenate(pairs, 1))
    num_groups = int(group.max(initial=-1)) + 1
    group_lowest = np.full(num_groups, np.iinfo(lowest.dtype).max, lowest.dtype)
    group_highest, is_group_open = np.zeros(num_groups, lowest.dtype), np.zeros(num_groups, bool)
    np.minimum.at(group_lowest, group, lowest)
    np.maximum.at(group_highest, group, highest)
    is_group_open[group[is_open]] = True
    is_hole = (group_lowest == group_highest) & ~is_group_open
    filling_labels = np.where(is_hole, group_lowest, 0)[group]
    run.folder.write_array("fillings.npy", filling_labels)
    run.folder.write_array("components.npy", offsets)
    is_filled = filling_labels > 0
    return filling_labels[is_filled].astype(np.int64), stack_voxels[is_filled]


def _link_faces(run: OpenRun, archive: Any, tile: int, axis: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pairs of components that touch at the face between a tile and the tile after it along an axis, [2, E]."""
    neighbor = _get_neighbor(run.plan.layout, tile, axis, 1)
    assert neighbor is not None  # noqa: S101
    with run.folder.read_arrays(f"holes/{neighbor}.npz") as neighbor_archive:
        first, second = archive[f"face-{axis}-1"], neighbor_archive[f"face-{axis}-0"]
    is_linked = (first > 0) & (second > 0)
    pairs = np.unique(np.stack([first[is_linked], second[is_linked]]), axis=1)
    result: NDArray[np.int64] = pairs + np.array([[offsets[tile]], [offsets[neighbor]]])
    return result


def _fill_tile(run: OpenRun, tile: int, box: tuple[slice, slice, slice], labels: Array, numbers: Array) -> Array:
    """Fill holes in the labels of a part of a tile. `numbers` contains the label of each object number."""
    first, end = run.folder.read_array("components.npy")[tile : tile + 2]
    filling_labels = numbers[run.folder.read_array("fillings.npy")[first:end]]
    return labels + filling_labels[read_pixels(run, tile, box, "holes")] if filling_labels.any() else labels


def choose_objects(run: OpenRun) -> dict[str, Any]:
    """Remove objects that are too small in a resampled stack, and write the remaining objects and their labels.

    Returns the fields of the block's record.
    """
    *properties, stack_voxels = run.folder.read_array("candidates.npy")
    stack_voxels = np.array(stack_voxels)
    if fills_holes(run):
        filled_objects, hole_voxels = _join_holes(run)
        np.add.at(stack_voxels, filled_objects - 1, hole_voxels)
    is_kept = np.ones(len(stack_voxels), bool)
    if run.plan.layout.size != run.plan.size:
        is_kept = stack_voxels >= max(compute_min_voxels(run.plan.options.postprocessing, run.plan), 1)
    run.folder.write_array("numbers.npy", number_objects(is_kept))
    run.folder.write_array("objects.npy", np.stack(properties)[:, is_kept])
    return {"objects": int(is_kept.sum())}


def label_tile(run: OpenRun, tile: int, box: tuple[slice, slice, slice]) -> Array:
    """Return the labels in a part of a tile. `box` is relative to the tile."""
    numbers = run.folder.read_array("numbers.npy")
    labels = _label_pixels(run, tile, box, numbers[_read_piece_labels(run, tile)])
    return _fill_tile(run, tile, box, labels, numbers) if fills_holes(run) else labels
