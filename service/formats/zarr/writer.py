"""Write a segmentation as OME-Zarr: a store of its own (0.5), or among the labels of an image (as that is, 0.4 or 0.5).

https://ngff.openmicroscopy.org. It needs the extra `zarr`.
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

from service.core.files.whole_file import write_whole
from service.core.types import Array, Segmentation
from service.formats.tiff.writer import NOTHING, ORIGIN_NAMESPACE
from service.formats.zarr.store import find_image

VERSIONS = {2: "0.4", 3: "0.5"}
# Along the last axes z, y, x; a shard is one file of several chunks, and in memory while it is written.
_CHUNK, _SHARD = (16, 256, 256), (64, 512, 512)
# Planes of the coarsest resolution are no larger.
_COARSEST_EDGE = 256
_TIME_UNITS = {
    "s": "second", "ms": "millisecond", "µs": "microsecond", "ns": "nanosecond", "min": "minute", "h": "hour",
    "d": "day",
}  # fmt: skip
_TYPES = {"T": "time", "C": "channel"}
_ARCHIVE_COMMENT = b'{"ome": {"version": "0.5", "zipFile": {"centralDirectory": {"jsonFirst": true}}}}'


def write(segmentation: Segmentation, path: Path, origin: Mapping[str, str] = NOTHING) -> None:
    """Write labels, classes or probabilities with a pyramid and the voxel size; `path` appears only once complete.

    Coarser resolutions have every second voxel, so that labels stay what they are. A store that is there is replaced.
    `origin`, facts about how the segmentation was made, is an attribute of the group under `ORIGIN_NAMESPACE`.
    """
    partial = partial_path(path)
    try:
        for level in create(segmentation, path, origin):
            for part in level.parts:
                level.array[part] = level.reduce(segmentation.pixels)[part]
        finish(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_archive(segmentation: Segmentation, path: Path) -> None:
    """Write what `write` does as one file, a zip archive (.ozx) as RFC 9 of OME-Zarr has it: stored, metadata first.

    https://ngff.openmicroscopy.org/rfc/9
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".zarr-") as folder:
        store = Path(folder) / "labels.ome.zarr"
        write(segmentation, store)
        files = [file for file in store.rglob("*") if file.is_file()]
        files.sort(key=lambda file: (file.name != "zarr.json", len(file.parts), file))
        with write_whole(path, sync=False) as partial, ZipFile(partial, "w", ZIP_STORED) as archive:
            archive.comment = _ARCHIVE_COMMENT
            for file in files:
                archive.write(file, file.relative_to(store))
                file.unlink()


class Level(NamedTuple):
    """One resolution of a store that is being written: steps along z, y, x in the finest, and shape of its blocks.

    Blocks, one file each where the store is sharded, may be written by several processes at a time.
    """

    array: Any
    steps: tuple[int, int, int]
    block: tuple[int, ...]

    @property
    def parts(self) -> Iterator[tuple[slice, ...]]:
        """Places of the blocks."""
        shape = self.array.shape
        for start in itertools.product(*(range(0, n, step) for n, step in zip(shape, self.block, strict=True))):
            yield tuple(
                slice(first, min(first + n, end)) for first, n, end in zip(start, self.block, shape, strict=True)
            )

    def reduce(self, pixels: Array) -> Array:
        """Return the voxels of the finest resolution that this one has."""
        z, y, x = self.steps
        return pixels[..., ::z, ::y, ::x]


def create(segmentation: Segmentation, path: Path, origin: Mapping[str, str] = NOTHING) -> list[Level]:
    """Make a store for labels, classes or probabilities without pixels at `partial_path(path)`.

    Of `segmentation.pixels` the shape and dtype count. A store that is there is replaced. `origin` as in `write`.
    """
    image = find_image(path)
    version: Literal[2, 3] = 2 if image is not None and not (image / "zarr.json").exists() else 3
    partial = partial_path(path)
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    group = zarr.open_group(partial, mode="w-", zarr_format=version)
    levels = [
        _make_level(group, number, segmentation, steps) for number, steps in enumerate(_choose_steps(segmentation))
    ]
    datasets = [_describe_level(number, segmentation, level.steps) for number, level in enumerate(levels)]
    group.attrs.update(_describe(segmentation, datasets, version, path.name, in_image=image is not None))
    if origin:
        group.attrs[ORIGIN_NAMESPACE] = dict(origin)
    return levels


def open_level(path: Path, number: int) -> Any:
    """Open one resolution of the store that `create` has made for `path`, to read and write."""
    return zarr.open_array(partial_path(path) / str(number), mode="r+")


def finish(path: Path) -> None:
    """Give the store that `create` has made its name, and list it among the labels of its image."""
    if path.exists():
        shutil.rmtree(path)
    partial_path(path).rename(path)
    image = find_image(path)
    if image is not None:
        version: Literal[2, 3] = 3 if (image / "zarr.json").exists() else 2
        _list_label(zarr.open_group(path.parent, mode="a", zarr_format=version), path.name, version)


def partial_path(path: Path) -> Path:
    """Return where a store lies until it is complete."""
    return path.with_name(f".{path.name}.part")


def _choose_steps(segmentation: Segmentation) -> Iterator[tuple[int, int, int]]:
    """Yield the steps along z, y, x of each resolution, the finest first.

    Planes are halved until they are small, and z once its voxels are no longer than those of a plane.
    """
    sizes = np.array(tuple(segmentation.voxel_size or (np.inf, 1.0, 1.0)))
    steps, shape = np.ones(3, int), np.array(segmentation.pixels.shape[-3:])
    while True:
        yield int(steps[0]), int(steps[1]), int(steps[2])
        if max(-(-shape // steps)[1:]) <= _COARSEST_EDGE:
            return
        steps[1:] *= 2
        steps[0] *= 1 + (steps[0] * sizes[0] <= min(steps[1:] * sizes[1:]) and shape[0] > steps[0])


def _make_level(group: Any, number: int, segmentation: Segmentation, steps: tuple[int, int, int]) -> Level:
    """Make the array of one resolution, without pixels."""
    z, y, x = steps
    pixels: Array = segmentation.pixels[..., ::z, ::y, ::x]
    outer = (1,) * (pixels.ndim - 3)
    chunks = outer + tuple(map(min, zip(_CHUNK, pixels.shape[-3:], strict=True)))
    block = outer + tuple(
        chunk * -(-min(shard, length) // chunk)
        for chunk, shard, length in zip(chunks[-3:], _SHARD, pixels.shape[-3:], strict=True)
    )
    is_sharded = group.metadata.zarr_format == 3
    array = group.create_array(
        str(number),
        shape=pixels.shape,
        dtype=pixels.dtype.newbyteorder("="),
        chunks=chunks,
        shards=block if is_sharded else None,
        fill_value=0,
        **({"dimension_names": list(segmentation.axes.lower())} if is_sharded else _SLASHES),
    )
    return Level(array, steps, block)


def _describe_level(number: int, segmentation: Segmentation, steps: tuple[int, int, int]) -> dict[str, Any]:
    """Return what the metadata say of one resolution."""
    scale = dict(zip("ZYX", np.multiply(steps, tuple(segmentation.voxel_size or (1, 1, 1))).tolist(), strict=True))
    if segmentation.time_interval is not None:
        scale["T"] = segmentation.time_interval.length
    factors = [float(scale.get(axis, 1)) for axis in segmentation.axes]
    return {"path": str(number), "coordinateTransformations": [{"type": "scale", "scale": factors}]}


_SLASHES = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}


def _describe(
    segmentation: Segmentation, datasets: list[dict[str, Any]], version: int, name: str, *, in_image: bool
) -> dict[str, Any]:
    """Return the attributes of the group."""
    number = {"version": VERSIONS[version]}
    axes = _describe_axes(segmentation)
    multiscales = {"name": name, "axes": axes, "datasets": datasets, "type": "nearest"}
    ome: dict[str, Any] = {"multiscales": [multiscales | (number if version == 2 else {})]}
    if segmentation.kind == "probabilities":
        ome["omero"] = {"channels": [_channel(label) for label in segmentation.names]}
    else:
        ome["image-label"] = (number if version == 2 else {}) | ({"source": {"image": "../../"}} if in_image else {})
        if segmentation.names:
            ome["image-label"]["properties"] = [
                {"label-value": value, "name": label} for value, label in enumerate(segmentation.names)
            ]
    return ome if version == 2 else {"ome": number | ome}


def _describe_axes(segmentation: Segmentation) -> list[dict[str, str]]:
    """Return what the metadata say of each axis."""
    units = dict.fromkeys("ZYX", "micrometer") if segmentation.voxel_size else {}
    interval = segmentation.time_interval
    if interval is not None and interval.unit in _TIME_UNITS:
        units["T"] = _TIME_UNITS[interval.unit]
    return [
        {"name": axis.lower(), "type": _TYPES.get(axis, "space")} | ({"unit": units[axis]} if axis in units else {})
        for axis in segmentation.axes
    ]


def _channel(label: str) -> dict[str, Any]:
    return {"label": label, "color": "FFFFFF", "window": {"min": 0, "max": 1, "start": 0, "end": 1}, "active": True}


def _list_label(labels: Any, name: str, version: int) -> None:
    """Add a name to those that the group of labels lists."""
    ome = dict(labels.attrs) if version == 2 else dict(labels.attrs.get("ome", {}))
    ome["labels"] = sorted({*ome.get("labels", ()), name})
    labels.attrs.update(ome if version == 2 else {"ome": {"version": VERSIONS[version]} | ome})
