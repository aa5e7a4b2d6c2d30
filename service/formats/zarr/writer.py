"""Write a segmentation as OME-Zarr, as a separate store or as labels of an existing image.

Separate stores are written in OME-Zarr 0.5. Labels of an existing image are written in the version of that image, 0.4
or 0.5. The `zarr` extra is required. Specification: https://ngff.openmicroscopy.org.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import zarr

from service.core.errors import BadParameter
from service.core.files.atomic_files import name_full_disk, write_atomically
from service.core.files.zip_archive import add_file
from service.core.types import Array, Segmentation
from service.formats.tiff.imagej_metadata import PROVENANCE_NAMESPACE
from service.formats.tiff.writer import NO_PROVENANCE
from service.formats.zarr import image_coordinates
from service.formats.zarr.label_metadata import (
    copy_coordinates,
    describe_coordinates,
    make_ome_attributes,
    register_label,
)
from service.formats.zarr.store import METADATA_NAMES, find_labeled_image

# Shapes along z, y, x. A shard is one file with several chunks and is held in memory while it is being written.
_CHUNK_SHAPE = (16, 256, 256)
_SHARD_SHAPE = (64, 512, 512)
# Maximum edge length of the planes at the coarsest resolution.
_MAX_COARSEST_EDGE = 256
_V2_KEY_ENCODING = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
_ARCHIVE_COMMENT = b'{"ome": {"version": "0.5", "zipFile": {"centralDirectory": {"jsonFirst": true}}}}'


def write(segmentation: Segmentation, path: Path, provenance: Mapping[str, str] = NO_PROVENANCE) -> None:
    """Write labels, classes or probabilities as OME-Zarr, with a resolution pyramid and the voxel size.

    Coarser resolutions are subsampled, not averaged, because averages of labels are meaningless. An existing store
    is replaced. The store appears only when complete. `provenance` describes how the segmentation was made. It is
    stored in the group attribute `PROVENANCE_NAMESPACE`.
    """
    temporary_path = get_partial_path(path)
    try:
        with name_full_disk(path):
            for level in create(segmentation, path, provenance):
                for block in level.blocks:
                    level.array[block] = level.subsample(segmentation.pixels)[block]
            finish(path)
    finally:
        shutil.rmtree(temporary_path, ignore_errors=True)


def write_archive(segmentation: Segmentation, path: Path) -> None:
    """Write labels as a store in a single zip archive (.ozx), uncompressed and with the metadata first.

    This is the format of RFC 9 of OME-Zarr, https://ngff.openmicroscopy.org/rfc/9.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".zarr-") as folder:
        store = Path(folder) / "labels.ome.zarr"
        write(segmentation, store)
        files = [file for file in store.rglob("*") if file.is_file()]
        files.sort(key=lambda file: (file.name != "zarr.json", len(file.parts), file))
        with write_atomically(path, sync=False) as archive_path, ZipFile(archive_path, "w", ZIP_STORED) as archive:
            archive.comment = _ARCHIVE_COMMENT
            for file in files:
                add_file(archive, file, file.relative_to(store).as_posix())
                file.unlink()


class Level(NamedTuple):
    """One resolution of a store that is being written.

    steps        distance between neighboring voxels along z, y, x, in voxels of the full resolution
    block_shape  shape of blocks that several processes may write independently; in a sharded array, a block is one file
    """

    array: Any
    steps: tuple[int, int, int]
    block_shape: tuple[int, ...]

    @property
    def blocks(self) -> Iterator[tuple[slice, ...]]:
        """Slices of the blocks."""
        shape = self.array.shape
        for start in itertools.product(*(range(0, n, step) for n, step in zip(shape, self.block_shape, strict=True))):
            yield tuple(
                slice(first, min(first + n, end)) for first, n, end in zip(start, self.block_shape, shape, strict=True)
            )

    def subsample(self, pixels: Array) -> Array:
        """Return the voxels of the full resolution that belong to this resolution."""
        z, y, x = self.steps
        return pixels[..., ::z, ::y, ::x]


def create(segmentation: Segmentation, path: Path, provenance: Mapping[str, str] = NO_PROVENANCE) -> list[Level]:
    """Create a store without pixels for labels, classes or probabilities at `get_partial_path(path)`.

    Only the shape and dtype of `segmentation.pixels` are used. An existing store is replaced when the new one is
    finished. Labels in the `labels` group of an image have its resolutions and coordinate system. See `write` for
    `provenance`. Raises BadParameter for probabilities in such a group.
    """
    image = _find_image(path, segmentation)
    coordinates = None if image is None else image_coordinates.read(image, segmentation)
    zarr_format: Literal[2, 3] = 2 if image is not None and not (image / "zarr.json").exists() else 3
    temporary_path = get_partial_path(path)
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(temporary_path, ignore_errors=True)
    group = zarr.open_group(temporary_path, mode="w-", zarr_format=zarr_format)
    levels = [
        _create_level(group, level_number, segmentation, steps)
        for level_number, steps in enumerate(coordinates.steps if coordinates else _choose_steps(segmentation))
    ]
    if coordinates:
        described_coordinates = copy_coordinates(coordinates)
    else:
        described_coordinates = describe_coordinates(segmentation, [level.steps for level in levels])
    multiscales = {"name": path.name, "type": "nearest"} | described_coordinates
    group.attrs.update(make_ome_attributes(segmentation, multiscales, zarr_format, is_in_image=image is not None))
    if provenance:
        group.attrs[PROVENANCE_NAMESPACE] = dict(provenance)
    return levels


def _find_image(path: Path, segmentation: Segmentation) -> Path | None:
    """Return the image whose `labels` group contains `path`, if any. Raises BadParameter for probabilities in it."""
    image = find_labeled_image(path)
    if image is not None and segmentation.pixels.dtype.kind not in "ui":
        raise BadParameter(
            f"{path.name} is in the `labels` group of an OME-Zarr image, which may contain only integers, not"
            f" {segmentation.kind}. Write a separate store instead."
        )
    return image


def open_level(path: Path, level_number: int) -> Any:
    """Open one resolution of the store that `create` created for `path`, for reading and writing."""
    return zarr.open_array(get_partial_path(path) / str(level_number), mode="r+")


def finish(path: Path) -> None:
    """Rename the store created by `create` to its final name, and add it to the list of labels of its image, if any."""
    _store_empty_chunks(get_partial_path(path))
    if path.exists():
        shutil.rmtree(path)
    get_partial_path(path).rename(path)
    image = find_labeled_image(path)
    if image is not None:
        zarr_format: Literal[2, 3] = 3 if (image / "zarr.json").exists() else 2
        register_label(zarr.open_group(path.parent, mode="a", zarr_format=zarr_format), path.name, zarr_format)


def _store_empty_chunks(store: Path) -> None:
    """Store one chunk in each level without objects. Otherwise, readers could not tell the level from a lost one."""
    for level in filter(Path.is_dir, store.iterdir()):
        if not any(file.is_file() and file.name not in METADATA_NAMES for file in level.rglob("*")):
            with zarr.config.set({"array.write_empty_chunks": True}):
                array: Any = zarr.open_array(level, mode="r+")
                array[(slice(1),) * array.ndim] = 0


def get_partial_path(path: Path) -> Path:
    """Return the path of a store while it is being written."""
    return path.with_name(f".{path.name}.part")


def _choose_steps(segmentation: Segmentation) -> Iterator[tuple[int, int, int]]:
    """Yield the steps along z, y, x of each resolution, beginning with the full resolution.

    The resolution along Y and X is halved until the planes are small. The resolution along Z is halved at the same time
    unless the distance between planes is larger than the resulting pixel size.
    """
    sizes = np.array(tuple(segmentation.voxel_size or (np.inf, 1.0, 1.0)))
    steps, shape = np.ones(3, int), np.array(segmentation.pixels.shape[-3:])
    while True:
        yield int(steps[0]), int(steps[1]), int(steps[2])
        if max(-(-shape // steps)[1:]) <= _MAX_COARSEST_EDGE:
            return
        steps[1:] *= 2
        steps[0] *= 1 + (steps[0] * sizes[0] <= min(steps[1:] * sizes[1:]) and shape[0] > steps[0])


def _create_level(group: Any, level_number: int, segmentation: Segmentation, steps: tuple[int, int, int]) -> Level:
    """Create the array of one resolution, without writing pixels."""
    z, y, x = steps
    pixels: Array = segmentation.pixels[..., ::z, ::y, ::x]
    outer_shape = (1,) * (pixels.ndim - 3)
    chunks = outer_shape + tuple(map(min, zip(_CHUNK_SHAPE, pixels.shape[-3:], strict=True)))
    block_shape = outer_shape + tuple(
        chunk * -(-min(shard, length) // chunk)
        for chunk, shard, length in zip(chunks[-3:], _SHARD_SHAPE, pixels.shape[-3:], strict=True)
    )
    is_sharded = group.metadata.zarr_format == 3
    array = group.create_array(
        str(level_number),
        shape=pixels.shape,
        dtype=pixels.dtype.newbyteorder("="),
        chunks=chunks,
        shards=block_shape if is_sharded else None,
        fill_value=0,
        **({"dimension_names": list(segmentation.axes.lower())} if is_sharded else _V2_KEY_ENCODING),
    )
    return Level(array, steps, block_shape)
