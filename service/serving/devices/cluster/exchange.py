"""Pixels and labels on storage that all hosts mount, and the records that name them.

Files are read, never mapped: one that is deleted, or whose storage is gone, is then an error and not the end of the
process.
"""

from __future__ import annotations

import itertools
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.core.buffers import LARGE_BYTES, Allocate
from service.core.errors import ConfigError, OutOfStorage, StackSegError, StorageUnavailable
from service.core.hardware.gpus import GpuStatus
from service.core.hardware.host import CpuStatus
from service.core.quantities import VoxelSize
from service.core.types import Array, Options, StackShape, Volume
from service.inference.windows.batching.window_request import Share
from service.serving.storage.disk import DISK_FULL

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.inference.types import EngineReport, Result, Sizing
    from service.models.spec import ModelSpec
    from service.serving.devices.queue.job import Progress

FOLDER_PREFIX = "stackseg-cluster-"
# Its time of change tells that the service runs; beyond so many seconds another one deletes the folder. Clocks of hosts
# may differ.
MARKER, ABANDONED_SECONDS = ".stackseg-cluster", 3600.0
# Written at a time.
BLOCK_BYTES = 2**26


class StoredVolume(NamedTuple):
    """A volume whose pixels [C, Z, Y, X] lie in a file without a header, in C order. Other fields as in `Volume`."""

    path: Path
    shape: StackShape
    dtype: str
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]
    notes: tuple[str, ...]

    def open(self) -> Volume:
        """Return the volume, which is in memory unless it is large."""
        volume = Volume(
            self.shape, np.dtype(self.dtype), self._read, self.voxel_size, channels=self.channels, notes=self.notes
        )
        if volume.nbytes >= LARGE_BYTES:
            return volume
        pixels = volume.array()
        return replace(volume, read=lambda z0, z1: pixels[:, z0:z1])

    def _read(self, z0: int, z1: int) -> Array:
        """Read planes [C, z1 - z0, Y, X]."""
        channels, z, y, x = self.shape
        pixels: Array = np.empty((channels, z1 - z0, y, x), self.dtype)
        with self.path.open("rb") as file:
            for channel in range(channels):
                file.seek((channel * z + z0) * y * x * pixels.itemsize)
                _read_into(file, pixels[channel])
        return pixels


class Task(NamedTuple):
    """Work for an actor.

    id       unique, by which it is cancelled
    model    name of the model among all versions of all models
    volume   None where the model is only loaded
    windows  estimated number; 0 if unknown
    """

    id: str
    model: str
    spec: ModelSpec
    volume: StoredVolume | None = None
    options: Options = Options()
    windows: int = 0


class Loaded(NamedTuple):
    """A model that an actor has loaded."""

    estimator: Estimator
    report: EngineReport
    nbytes: int


class Segmented(NamedTuple):
    """A segmentation whose pixels lie in the file `path` in C order, with this shape; `result` has none of them."""

    result: Result
    path: Path
    shape: tuple[int, ...]

    def open(self, allocate: Allocate) -> Result:
        """Return the result with its pixels. Raises OutOfStorage and OSError."""
        segmentation = self.result.segmentation
        pixels = allocate(self.shape, segmentation.pixels.dtype)
        with self.path.open("rb") as file:
            _read_into(file, pixels)
        return self.result._replace(segmentation=replace(segmentation, pixels=pixels))


class Outcome(NamedTuple):
    """Outcome of a task: a value or an error, and the windows that were computed for it.

    Errors are values here, so that those of the work are told from those of the cluster.
    """

    value: Loaded | Segmented | Sizing | None = None
    error: StackSegError | None = None
    share: Share = Share(0, 0.0, 0.0)


class Status(NamedTuple):
    """State of an actor: its host with all that is there, why its device cannot be used, the progress of its tasks."""

    host: str
    problem: str | None
    gpus: tuple[GpuStatus, ...]
    cpu: CpuStatus
    progress: Mapping[str, Progress]


class Exchange:
    """A folder of this process below `parent`, with a folder for every request. Raises ConfigError."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._renewed = time.monotonic()
        try:
            _sweep(parent)
            self.path.mkdir(mode=0o700)
            (self.path / MARKER).touch()
        except OSError as error:
            raise ConfigError(
                f"cluster.shared_folder: {parent} is not a folder that this process may write to: {error.strerror}."
            ) from error

    def renew(self) -> None:
        """Tell others now and then that this process still uses the folder."""
        if time.monotonic() - self._renewed > ABANDONED_SECONDS / 60:
            self._renewed = time.monotonic()
            with suppress(OSError):
                (self.path / MARKER).touch()

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def lend(self, volume: Volume) -> Iterator[StoredVolume]:
        """Write the pixels of a volume into a folder that is deleted after the block.

        Raises OutOfStorage and StorageUnavailable, also for OSError of the block.
        """
        folder = self.path / str(next(self._numbers))
        try:
            folder.mkdir(mode=0o700)
            yield store_volume(volume, folder / "pixels")
        except OSError as error:
            if error.errno in DISK_FULL:
                raise OutOfStorage("The storage of the cluster is full; try again later, or send less.") from error
            raise StorageUnavailable(
                f"The storage of the cluster cannot be used ({error.strerror}); try again later."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def store_volume(volume: Volume, path: Path) -> StoredVolume:
    """Write the pixels of a volume into a new file, some planes at a time."""
    channels, z, y, x = volume.shape
    plane = y * x * volume.dtype.itemsize
    planes = max(BLOCK_BYTES // max(plane * channels, 1), 1)
    with path.open("xb") as file:
        for z0 in range(0, z, planes):
            block = volume.read(z0, min(z0 + planes, z))
            for channel in range(channels):
                file.seek((channel * z + z0) * plane)
                file.write(np.ascontiguousarray(block[channel]).data)
    return StoredVolume(path, volume.shape, volume.dtype.str, volume.voxel_size, volume.channels, volume.notes)


def store_result(result: Result, path: Path) -> Segmented:
    """Write the pixels of a segmentation into a new file."""
    segmentation = result.segmentation
    with path.open("xb") as file:
        for part in segmentation.pixels:
            file.write(np.ascontiguousarray(part).data)
    bare = replace(segmentation, pixels=np.empty(0, segmentation.pixels.dtype))
    return Segmented(result._replace(segmentation=bare), path, segmentation.pixels.shape)


def _read_into(file: BufferedReader, pixels: Array) -> None:
    """Fill a contiguous array. Raises OSError for a file that ends before."""
    if file.readinto(pixels.reshape(-1).view(np.uint8).data) < pixels.nbytes:
        raise OSError(None, "a file ends before its last voxel")


def _sweep(parent: Path) -> None:
    """Delete the folders of services that were killed."""
    for marker in parent.glob(f"{FOLDER_PREFIX}*/{MARKER}"):
        with suppress(OSError):
            if time.time() - marker.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(marker.parent, ignore_errors=True)
