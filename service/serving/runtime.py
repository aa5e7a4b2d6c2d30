"""What requests use: settings, models, devices with their queues, readers of files, and space on disk."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from service.core.config import Settings
from service.core.errors import NotReady, StackSegError
from service.core.files.bundled import software_version
from service.core.types import Extent, Options
from service.inference.types import Estimate
from service.serving.devices.local.malloc_trim import MallocTrimmer
from service.serving.devices.reservation import Reservation
from service.serving.storage.disk import DiskUsage, measure_disk
from service.serving.storage.scratch import ScratchFolder, ScratchSpace

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader
    from service.inference.runner.estimator import Estimator
    from service.inference.types import Estimate
    from service.models.spec import ModelSpec
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.devices.pool import DevicePool
    from service.serving.metrics import Metrics
    from service.serving.results.cache import ResultCache
    from service.serving.results.metadata import AnswerMetadata
    from service.serving.storage.host_files import HostFiles
    from service.serving.storage.readers import FileReaders
    from service.serving.storage.volume_cache import VolumeCache

# A segmentation stops before its next batch of windows. A compilation cannot be stopped, and is left behind.
JOIN_SECONDS = 4.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Files(NamedTuple):
    """Where requests get their stacks from, and where they keep files."""

    host_files: HostFiles
    scratch: ScratchFolder
    result_cache: ResultCache[tuple[AnswerMetadata, str]]
    volumes: VolumeCache
    readers: FileReaders


class Runtime:
    """The owner of all threads and child processes. Models become ready one after the other after `start` returned.

    draining     whether the service was told to stop
    checks       each returns why the service is not ready, in one sentence, or None
    unfinished   each returns whether something is being done that may still finish once the service was told to stop
    disk_usages  each measures the files of one kind, whose name is that of a label of the metrics
    """

    def __init__(
        self, settings: Settings, devices: DevicePool, models: ModelRegistry, metrics: Metrics, files: Files
    ) -> None:
        self.settings, self.devices, self.models, self.metrics = settings, devices, models, metrics
        self.host_files, self.scratch, self.result_cache, self.volumes, self._readers = files
        self.read_threads, self.decode_threads = files.readers.read_threads, files.readers.decode_threads
        self.scratch_space: ScratchSpace
        # Looking the version up takes a millisecond.
        self._version = software_version()
        self._window_settings = settings.windows.model_dump(mode="json")
        self._started = time.monotonic()
        self._trimmer = MallocTrimmer()
        self.checks: list[Callable[[], str | None]] = []
        self.unfinished: list[Callable[[], bool]] = [lambda: bool(devices.running)]
        self.disk_usages: dict[str, Callable[[], DiskUsage]] = {
            "requests": lambda: measure_disk(self.scratch.path, self.scratch_space.used, self.scratch_space.limit),
            "results": lambda: measure_disk(self.scratch.path, self.result_cache.nbytes, settings.limits.cache_bytes),
        }
        self.draining = False
        self._drain_timer: threading.Timer | None = None

    @property
    def reader(self) -> Reader:
        """The reader of stacks in child processes, once the runtime has started."""
        return self._readers.reader

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def busy(self) -> bool:
        """Whether something is computed or written."""
        return any(check() for check in self.unfinished)

    def start(self) -> None:
        """Read the model repository, and begin to load the models that are wanted at start."""
        self.scratch.create()
        free_bytes = shutil.disk_usage(self.scratch.path).free
        self.scratch_space = ScratchSpace(min(self.settings.limits.scratch_bytes, free_bytes))
        self._readers.start()
        self._trimmer.start()
        self.models.read_repository()
        self.devices.start(self.models.specs, self.models.load_first)

    def drain(self) -> None:
        """Refuse requests from now on. Those that were accepted may finish within server.drain_seconds."""
        if self.draining:
            return
        self.draining = True
        self.devices.drain()
        self._drain_timer = threading.Timer(self.settings.server.drain_seconds, self.devices.cancel_requests)
        self._drain_timer.daemon = True
        self._drain_timer.start()

    def stop(self) -> None:
        """Cancel all requests, end threads and child processes, delete the scratch folder."""
        self.draining = True
        self.devices.drain()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self.devices.stop(JOIN_SECONDS)
        self._trimmer.stop()
        self._readers.stop()
        self.scratch.delete()

    def check_admission(self, caller: str | None = None) -> None:
        """Raise NotReady or QueueFull if a request of this caller would be refused after its upload."""
        if self.draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        self.devices.check_admission(caller)

    def unready_reasons(self) -> tuple[str, ...]:
        """Return why the service is not ready, one sentence each; empty when it is ready."""
        reasons = [reason for check in self.checks if (reason := check()) is not None]
        if self.draining:
            reasons.append("The service is stopping.")
        return (*reasons, *self.devices.unready_reasons(), *self.models.unready_reasons())

    def degradations(self) -> tuple[str, ...]:
        """Return what is wrong though the service is ready, one sentence each."""
        missing = (f"Files are read without {layer}: {reason}." for layer, reason in self.reader.missing.items())
        return (*self.models.degradations(), *self.devices.degradations(), *missing)

    def measure_disks(self) -> dict[str, DiskUsage]:
        """Return what is kept on disk, by its kind; what cannot be measured now is left out."""
        usages = {}
        for kind, measure in self.disk_usages.items():
            with suppress(StackSegError, OSError):
                usages[kind] = measure()
        return usages

    def estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model. It guesses the memory of one that was never loaded."""
        loaded = self.models.loaded(spec.name)
        return loaded.estimator if loaded else self.devices.all[0].scheduler.models.estimator(spec)

    def estimate(self, spec: ModelSpec, volume: Extent, options: Options) -> Estimate:
        """Estimate windows and memory of a segmentation. Raises BadParameter and TooLarge."""
        return self.estimator(spec).estimate(volume, options)

    def estimate_seconds(self, model: str, windows: int, caller: str | None = None) -> float | None:
        """Estimate the seconds until so many windows of a model would be done; None before any of it were timed."""
        queue = self.devices.choose(model, caller).scheduler.queue
        seconds = queue.expect(model, windows)
        return None if seconds is None else queue.expected_seconds + seconds

    def execution_settings(self, model: str) -> dict[str, Any]:
        """Return what decides about labels beside the model and the request: version, windows, engines in use.

        Another process that runs the model with the same settings returns an equal value. The engines of a model that
        was never loaded are not known yet.
        """
        return {"version": self._version, "windows": self._window_settings, "engines": self.devices.engines(model)}

    def reserve(self, model: str, caller: str | None = None) -> Reservation:
        """Choose the device that should answer a caller's request for this model first."""
        scheduler = self.devices.choose(model, caller).scheduler
        return Reservation(scheduler, model, self.settings.server.scratch_folder)
