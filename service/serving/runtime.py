"""The runtime that all requests share: settings, models, devices and their queues, file readers and storage."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from service.core.config import Settings
from service.core.errors import NotReady, StackSegError
from service.core.files.bundled import get_software_version
from service.core.types import Extent, Options
from service.serving.devices.local.malloc_trim import MallocTrimmer
from service.serving.devices.reservation import Reservation
from service.serving.storage.disk import DiskUsage, measure_disk
from service.serving.storage.scratch import ScratchFolder, ScratchSpace

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Reader
    from service.inference.runner.estimator import Estimator
    from service.inference.types import ResourceEstimate
    from service.models.spec import ModelSpec
    from service.serving.devices.model_registry import ModelRegistry
    from service.serving.devices.pool import DevicePool
    from service.serving.metrics import Metrics
    from service.serving.results.cache import ResultCache
    from service.serving.results.metadata import ResultMetadata
    from service.serving.storage.host_files import HostFiles
    from service.serving.storage.readers import FileReaders
    from service.serving.storage.volume_cache import VolumeCache

# Time to wait for each group of threads at shutdown. A canceled segmentation stops before its next batch of
# windows, but a compilation cannot be interrupted, so shutdown continues without it.
JOIN_TIMEOUT_SECONDS = 4.0

log = logging.getLogger(__name__)


class StorageServices(NamedTuple):
    """The file readers, folders and caches that requests use."""

    host_files: HostFiles
    scratch: ScratchFolder
    result_cache: ResultCache[tuple[ResultMetadata, str]]
    volume_cache: VolumeCache
    readers: FileReaders


class Runtime:
    """Owner of all threads and child processes. Models become ready one after another after `start` has returned.

    is_draining           whether the service is shutting down
    readiness_checks      functions that each return a sentence if the service is not ready, else None
    activity_checks       functions that each return whether work is in progress
    disk_usage_functions  functions that each measure the disk usage of one kind of file, by its label in the metrics
    """

    def __init__(
        self, settings: Settings, devices: DevicePool, models: ModelRegistry, metrics: Metrics, storage: StorageServices
    ) -> None:
        self.settings, self.devices, self.models, self.metrics = settings, devices, models, metrics
        self.host_files, self.scratch, self.result_cache, self.volume_cache, self._readers = storage
        self.read_threads, self.decode_threads = storage.readers.read_threads, storage.readers.decode_threads
        self.plane_threads, self.host_threads = storage.readers.plane_threads, storage.readers.host_threads
        self.scratch_space: ScratchSpace
        # Cached, because determining the version takes a millisecond.
        self._version = get_software_version()
        self._window_settings = settings.windows.model_dump(mode="json")
        self._start_time = time.monotonic()
        self._trimmer = MallocTrimmer()
        self.readiness_checks: list[Callable[[], str | None]] = []
        self.activity_checks: list[Callable[[], bool]] = [lambda: bool(devices.running_jobs)]
        self.disk_usage_functions: dict[str, Callable[[], DiskUsage]] = {
            "requests": lambda: measure_disk(
                self.scratch.path, self.scratch_space.used_bytes, self.scratch_space.limit_bytes
            ),
            "results": lambda: measure_disk(self.scratch.path, self.result_cache.nbytes, settings.limits.cache_bytes),
        }
        self.is_draining = False
        self._drain_timer: threading.Timer | None = None

    @property
    def reader(self) -> Reader:
        """The reader that decodes stacks in child processes. Available after `start`."""
        return self._readers.reader

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._start_time

    @property
    def is_busy(self) -> bool:
        """Whether any request or job is being processed, or its result is being written."""
        return any(check() for check in self.activity_checks)

    def start(self) -> None:
        """Start the threads and readers, read the model repository, and start loading the startup models."""
        self.scratch.create()
        free_bytes = shutil.disk_usage(self.scratch.path).free
        self.scratch_space = ScratchSpace(min(self.settings.limits.scratch_bytes, free_bytes))
        self._readers.start()
        self._trimmer.start()
        self.models.read_repository()
        self.devices.start(self.models.specs, self.models.startup_models)

    def drain(self) -> None:
        """Refuse new requests. Accepted requests have `server.drain_seconds` to finish."""
        if self.is_draining:
            return
        self.is_draining = True
        self.devices.stop_watchdogs()
        self._drain_timer = threading.Timer(self.settings.server.drain_seconds, self.devices.cancel_requests)
        self._drain_timer.daemon = True
        self._drain_timer.start()

    def stop(self) -> None:
        """Cancel all requests, stop threads and child processes, and delete the scratch folder."""
        self.is_draining = True
        self.devices.stop_watchdogs()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self.devices.stop(JOIN_TIMEOUT_SECONDS)
        self._trimmer.stop()
        self._readers.stop()
        self.scratch.delete()

    def check_admission(self, caller: str | None = None) -> None:
        """Raise NotReady or QueueFull if a request from this caller would be refused after its upload."""
        if self.is_draining:
            raise NotReady("The service is stopping. Send the request again after it has restarted.")
        self.devices.check_admission(caller)

    def list_unready_reasons(self) -> tuple[str, ...]:
        """Return the reasons why the service is not ready, one sentence each; empty if it is ready."""
        reasons = [reason for check in self.readiness_checks if (reason := check()) is not None]
        if self.is_draining:
            reasons.append("The service is stopping.")
        return (*reasons, *self.devices.list_unready_reasons(), *self.models.list_unready_reasons())

    def list_degradations(self) -> tuple[str, ...]:
        """Return problems that do not make the service unready, one sentence each."""
        sandbox_warnings = (
            f"Files are read without {layer}: {reason}." for layer, reason in self.reader.missing_layers.items()
        )
        return (*self.models.list_degradations(), *self.devices.list_degradations(), *sandbox_warnings)

    def measure_disks(self) -> dict[str, DiskUsage]:
        """Return the disk usage by kind of file. Kinds that cannot be measured are omitted."""
        usages = {}
        for kind, measure in self.disk_usage_functions.items():
            with suppress(StackSegError, OSError):
                usages[kind] = measure()
        return usages

    def get_estimator(self, spec: ModelSpec) -> Estimator:
        """Return the estimator of a model. If the model has never been loaded, its memory requirement is a guess."""
        loaded_model = self.models.get_loaded_model(spec.name)
        return loaded_model.estimator if loaded_model else self.devices.all[0].scheduler.models.get_estimator(spec)

    def estimate(self, spec: ModelSpec, volume: Extent, options: Options) -> ResourceEstimate:
        """Estimate the number of windows and the memory of a segmentation. Raises BadParameter and TooLarge."""
        return self.get_estimator(spec).estimate(volume, options)

    def estimate_seconds(self, model: str, window_count: int, caller: str | None = None) -> float | None:
        """Estimate the seconds until a new request with this number of windows would be complete.

        Return None if no windows of the model have been timed yet.
        """
        queue = self.devices.choose_device(model, caller).scheduler.queue
        return queue.estimate_new_job_seconds(model, window_count)

    def get_execution_settings(self, model: str) -> dict[str, Any]:
        """Return everything that affects the labels, except the model and the request.

        This includes the version of the software, the window settings and the engines.

        Processes that run the model with the same settings return equal values. The engines are unknown until the model
        has been loaded once.
        """
        return {
            "version": self._version,
            "windows": self._window_settings,
            "engines": self.devices.describe_engines(model),
        }

    def reserve(self, model: str, caller: str | None = None) -> Reservation:
        """Reserve the device that is expected to complete a request for this model first."""
        scheduler = self.devices.choose_device(model, caller).scheduler
        return Reservation(scheduler, model, self.settings.server.scratch_folder)
