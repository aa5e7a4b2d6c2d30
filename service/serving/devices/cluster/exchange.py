"""Exchange of pixels and labels through shared storage, and the messages that refer to the files.

Files are read rather than memory-mapped. If a mapped file were deleted or its storage became unavailable, accessing the
file would kill the process, whereas reading only raises an error.
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

from service.core.buffers import LARGE_ARRAY_BYTES, Allocator
from service.core.errors import ConfigError, OutOfStorage, StackSegError, StorageUnavailable
from service.core.hardware.gpus import GpuStatus
from service.core.hardware.host import HostStatus
from service.core.quantities import VoxelSize
from service.core.types import Array, Options, StackShape, Volume
from service.inference.windows.batching.window_request import BatchShare
from service.serving.storage.disk import DISK_FULL_ERRNOS

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.inference.types import DiameterEstimate, EngineReport, Result
    from service.models.spec import ModelSpec
    from service.serving.devices.queue.job import Progress

FOLDER_PREFIX = "stackseg-cluster-"
# Name of the file whose modification time shows that the service is still running.
MARKER_NAME = ".stackseg-cluster"
# Age of the marker after which other services delete the folder. It is long, because clocks of hosts may differ.
ABANDONED_SECONDS = 3600.0
# Interval at which a service touches its marker.
TOUCH_INTERVAL_SECONDS = ABANDONED_SECONDS / 60
# Number of bytes to write at a time.
BLOCK_BYTES = 2**26


class StoredVolume(NamedTuple):
    """A volume whose pixels [C, Z, Y, X] are stored in C order in a file without a header. Fields match `Volume`."""

    path: Path
    shape: StackShape
    dtype: str
    voxel_size: VoxelSize | None
    channels: tuple[str, ...]
    notes: tuple[str, ...]

    def open(self) -> Volume:
        """Open the volume. Small volumes are read into memory."""
        volume = Volume(
            self.shape, np.dtype(self.dtype), self._read, self.voxel_size, channels=self.channels, notes=self.notes
        )
        if volume.nbytes >= LARGE_ARRAY_BYTES:
            return volume
        pixels = volume.read_all()
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
    """A task for an actor.

    id            unique id, which is used to cancel the task
    model         unique name of this version of the model
    volume        volume to process; None if the task only loads the model
    window_count  estimated number of windows; 0 if unknown
    """

    id: str
    model: str
    spec: ModelSpec
    volume: StoredVolume | None = None
    options: Options = Options()
    window_count: int = 0


class LoadedModelReport(NamedTuple):
    """Report on a model that an actor has loaded."""

    estimator: Estimator
    report: EngineReport
    nbytes: int


class StoredResult(NamedTuple):
    """A segmentation result whose pixels are stored in C order in the file `path`; `result` contains no pixels."""

    result: Result
    path: Path
    shape: tuple[int, ...]

    def open(self, allocate: Allocator) -> Result:
        """Read the pixels and return the complete result. Raises OutOfStorage and OSError."""
        segmentation = self.result.segmentation
        pixels = allocate(self.shape, segmentation.pixels.dtype)
        with self.path.open("rb") as file:
            _read_into(file, pixels)
        return self.result._replace(segmentation=replace(segmentation, pixels=pixels))


class Outcome(NamedTuple):
    """Outcome of a task: a value or an error, and the task's share of the processed windows.

    Errors of the task are returned as values, to distinguish them from errors of the cluster, which are raised.
    """

    value: LoadedModelReport | StoredResult | DiameterEstimate | None = None
    error: StackSegError | None = None
    share: BatchShare = BatchShare(0, 0.0, 0.0)


class ActorStatus(NamedTuple):
    """Status of an actor.

    host      name of the actor's host
    problem   reason why its device is unavailable; None if the device is available
    gpus      GPUs of the host
    cpu       processor and memory of the host
    progress  progress of its tasks, by task id
    """

    host: str
    problem: str | None
    gpus: tuple[GpuStatus, ...]
    cpu: HostStatus
    progress: Mapping[str, Progress]


class Exchange:
    """The exchange folder of this process, in `parent`. It contains a subfolder for each request.

    Raises ConfigError if `parent` is not writable.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self._folder_numbers = itertools.count()
        self._start_time = self._last_touch_time = time.monotonic()
        try:
            # Markers that look abandoned, with their modification times.
            self._old_markers = dict(_find_old_markers(parent))
            self.path.mkdir(mode=0o700)
            (self.path / MARKER_NAME).touch()
        except OSError as error:
            raise ConfigError(f"cluster.shared_folder: {parent} is not a writable folder: {error.strerror}.") from error

    def touch_marker(self) -> None:
        """Touch the marker if it has not been touched recently, to show that this process still uses the folder."""
        if time.monotonic() - self._last_touch_time > TOUCH_INTERVAL_SECONDS:
            self._last_touch_time = time.monotonic()
            with suppress(OSError):
                (self.path / MARKER_NAME).touch()
        # All markers look old if the clock has jumped, but a service in use touches its marker in the meantime.
        if self._old_markers and time.monotonic() - self._start_time > 3 * TOUCH_INTERVAL_SECONDS:
            self._delete_abandoned_folders()

    def _delete_abandoned_folders(self) -> None:
        """Delete the folders of services that were killed."""
        markers, self._old_markers = self._old_markers, {}
        for marker, modification_time in markers.items():
            with suppress(OSError):
                if marker.stat().st_mtime == modification_time:
                    shutil.rmtree(marker.parent, ignore_errors=True)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def share_volume(self, volume: Volume) -> Iterator[StoredVolume]:
        """Write the pixels of a volume to a folder that is deleted after the block.

        Raises OutOfStorage if the shared storage is full, and StorageUnavailable for any other OSError, including one
        that the block raises.
        """
        folder = self.path / str(next(self._folder_numbers))
        try:
            folder.mkdir(mode=0o700)
            yield store_volume(volume, folder / "pixels")
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise OutOfStorage(
                    "The shared storage of the cluster is full. Try again later, or send a smaller stack."
                ) from error
            raise StorageUnavailable(
                f"The shared storage of the cluster is unavailable ({error.strerror}). Try again later."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def store_volume(volume: Volume, path: Path) -> StoredVolume:
    """Write the pixels of a volume to a new file, several planes at a time."""
    channels, z, y, x = volume.shape
    plane_bytes = y * x * volume.dtype.itemsize
    planes_per_block = max(BLOCK_BYTES // max(plane_bytes * channels, 1), 1)
    with path.open("xb") as file:
        for z0 in range(0, z, planes_per_block):
            block = volume.read(z0, min(z0 + planes_per_block, z))
            for channel in range(channels):
                file.seek((channel * z + z0) * plane_bytes)
                file.write(np.ascontiguousarray(block[channel]).data)
    return StoredVolume(path, volume.shape, volume.dtype.str, volume.voxel_size, volume.channels, volume.notes)


def store_result(result: Result, path: Path) -> StoredResult:
    """Write the pixels of a segmentation to a new file."""
    segmentation = result.segmentation
    with path.open("xb") as file:
        for block in segmentation.pixels:
            file.write(np.ascontiguousarray(block).data)
    segmentation_without_pixels = replace(segmentation, pixels=np.empty(0, segmentation.pixels.dtype))
    return StoredResult(result._replace(segmentation=segmentation_without_pixels), path, segmentation.pixels.shape)


def _read_into(file: BufferedReader, pixels: Array) -> None:
    """Fill a contiguous array from a file. Raises OSError if the file is too short."""
    if file.readinto(pixels.reshape(-1).view(np.uint8).data) < pixels.nbytes:
        raise OSError(None, "a pixel file is truncated")


def _find_old_markers(parent: Path) -> Iterator[tuple[Path, float]]:
    """Yield the markers of services that may have been killed, with their modification times."""
    for marker in parent.glob(f"{FOLDER_PREFIX}*/{MARKER_NAME}"):
        with suppress(OSError):
            modification_time = marker.stat().st_mtime
            if time.time() - modification_time > ABANDONED_SECONDS:
                yield marker, modification_time
