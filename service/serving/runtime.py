"""All that lives as long as the process: settings, models, devices with their queues, readers of files."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from service.core import hardware, host
from service.core.bundled import software_version
from service.core.config import Settings
from service.core.errors import NotReady, StackSegError
from service.core.hardware import Driver
from service.core.types import Extent, Options, Volume
from service.engine.compile import torch_compile
from service.formats.sandbox.parent import Reader
from service.inference.series.time_points import Series
from service.inference.types import Estimate, Result
from service.models.spec import ModelSpec
from service.serving.devices.cluster.exchange import Status
from service.serving.devices.cluster.ray_cluster import connect_cluster
from service.serving.devices.cluster.remote_worker import Backlog, ConnectCluster, RemoteWorkers
from service.serving.devices.job import Job
from service.serving.devices.malloc_trim import MallocTrimmer
from service.serving.devices.model_registry import ModelRegistry
from service.serving.devices.segmenter import Segmenter
from service.serving.devices.worker import DeviceWorker, LoadSegmenter, Reservation, device_worker_settings
from service.serving.fair_threads import FairThreadPool
from service.serving.metrics import Metrics
from service.serving.results.cache import ResultCache
from service.serving.results.metadata import AnswerMetadata
from service.serving.storage.disk_usage import DiskUsage, measure_disk
from service.serving.storage.host_files import HostFiles
from service.serving.storage.scratch import ScratchFolder
from service.serving.storage.scratch_space import ScratchSpace
from service.serving.storage.volume_cache import VolumeCache

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
# Files read at the same time: those that take long to decode, each in threads of its own for a part of the time, and
# small ones, one more than a client can occupy.
LARGE_READERS = min(max(host.usable_cores() // 4, 1), 4)
SMALL_READERS = LARGE_READERS + 2
# A segmentation stops before its next batch of windows. A compilation cannot be stopped, and is left behind.
JOIN_SECONDS = 4.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Runtime:
    """The owner of all threads and child processes. Models become ready one after the other after `start` returned.

    load_segmenter  makes a segmenter of a model
    choose_driver   returns what tells about a device by its name; None: the only one
    connect         returns what asks the cluster for an actor
    draining        whether the service was told to stop
    Raises ConfigError for a device or a folder that does not exist.
    """

    def __init__(
        self,
        settings: Settings,
        load_segmenter: LoadSegmenter = Segmenter,
        choose_driver: Callable[[str | None], Driver] = lambda _name: hardware,
        connect: ConnectCluster = connect_cluster,
    ) -> None:
        self.settings = settings
        self.host_files = HostFiles(settings.references)
        self.metrics = Metrics()
        self._loading_lock = torch_compile.LoadingLock()
        local = (
            DeviceWorker(name, device_settings, load_segmenter, self.metrics, self._loading_lock, choose_driver(name))
            for name, device_settings in device_worker_settings(settings)
        )
        self._cluster = RemoteWorkers(settings, connect, self.metrics)
        self.device_workers: tuple[DeviceWorker, ...] = (*local, *self._cluster.workers)
        self.models = ModelRegistry(settings.models, self.device_workers, settings.trained_folder)
        self.scratch = ScratchFolder(settings.server.scratch_folder)
        self.result_cache: ResultCache[tuple[AnswerMetadata, str]] = ResultCache(
            self.scratch.results, settings.limits.cache_bytes
        )
        self.volumes = VolumeCache()
        self.scratch_space: ScratchSpace
        self.reader: Reader
        # As many as there are processes that read files: who waits for one holds no thread.
        self.read_threads = FairThreadPool(SMALL_READERS, "read")
        self.decode_threads = FairThreadPool(LARGE_READERS, "decode")
        # Looking the version up takes a millisecond.
        self._version = software_version()
        self._window_settings = settings.windows.model_dump(mode="json")
        self._started = time.monotonic()
        self._trimmer = MallocTrimmer()
        # Each returns why the service is not ready, in one sentence, or None.
        self.checks: list[Callable[[], str | None]] = []
        # Each returns whether something is being done that may still finish once the service was told to stop.
        self.unfinished: list[Callable[[], bool]] = [lambda: bool(self.running)]
        # Returns how many trainings run and wait, by these states.
        self.count_trainings: Callable[[], dict[str, float]] = dict
        # Each measures what is kept on disk of one kind, whose name is that of a label of the metrics.
        self.disk_usages: dict[str, Callable[[], DiskUsage]] = {
            "requests": lambda: measure_disk(self.scratch.path, self.scratch_space.used, self.scratch_space.limit),
            "results": lambda: measure_disk(
                self.scratch.path, self.result_cache.nbytes, self.settings.limits.cache_bytes
            ),
        }
        self.draining = False
        self._drain_timer: threading.Timer | None = None

    @property
    def hosts(self) -> tuple[Status, ...]:
        """The other hosts that have devices, each as one of these knew it last."""
        known = {worker.status.host: worker.status for worker in self._cluster.workers if worker.status}
        return tuple(known.values())

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        """Whether nothing is computed or loaded, and nothing ever will be."""
        return all(worker.ended for worker in self.device_workers)

    @property
    def busy(self) -> bool:
        """Whether something is computed or written."""
        return any(check() for check in self.unfinished)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a device."""
        return sum(worker.queue.waiting for worker in self.device_workers)

    @property
    def running(self) -> tuple[Job[Any], ...]:
        """The requests that run."""
        return tuple(job for worker in self.device_workers for job in worker.queue.running)

    def start(self) -> None:
        """Read the model repository, and begin to load the models that are wanted at start."""
        self.scratch.create()
        free_bytes = shutil.disk_usage(self.scratch.path).free
        self.scratch_space = ScratchSpace(min(self.settings.limits.scratch_bytes, free_bytes))
        self.reader = Reader(
            memory_bytes=READER_BYTES,
            seconds=self.settings.limits.read_seconds,
            decoded_bytes=self.settings.limits.decoded_bytes,
            shared_bytes=self.settings.references.decoded_bytes,
            processes=SMALL_READERS + LARGE_READERS,
        )
        # `reader.missing` is known then.
        self.read_threads.submit("", self.reader.await_start)
        self._trimmer.start()
        self._register_gauges()
        self.models.read_repository()
        for worker in self.device_workers:
            worker.start(self.models.specs, self.models.load_first)
        self._cluster.start(self._backlog, len(self.device_workers) - len(self._cluster.workers))

    def drain(self) -> None:
        """Refuse requests from now on. Those that were accepted may finish within server.drain_seconds."""
        if self.draining:
            return
        self.draining = True
        for worker in self.device_workers:
            worker.watchdog.stop()
        self._drain_timer = threading.Timer(self.settings.server.drain_seconds, self._cancel_requests)
        self._drain_timer.daemon = True
        self._drain_timer.start()

    def stop(self) -> None:
        """Cancel all requests, end threads and child processes, delete the scratch folder."""
        self.draining = True
        for worker in self.device_workers:
            worker.watchdog.stop()
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._cancel_requests()
        self._cluster.stop()
        for worker in self.device_workers:
            if not worker.stop(JOIN_SECONDS):
                log.warning("%s is still busy after %s s; leaving it behind", worker.name, JOIN_SECONDS)
        self._cluster.close()
        self._trimmer.stop()
        self.reader.close()
        self.read_threads.shutdown()
        self.decode_threads.shutdown()
        self.scratch.delete()

    def check_admission(self, caller: str | None = None) -> None:
        """Raise NotReady or QueueFull if a request of this caller would be refused after its upload."""
        if self.draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        first = self.device_workers[0]
        next((worker for worker in self.device_workers if not worker.queue.full(caller)), first).queue.check(caller)

    def unready_reasons(self) -> tuple[str, ...]:
        """Return why the service is not ready, one sentence each; empty when it is ready."""
        reasons = [reason for check in self.checks if (reason := check()) is not None]
        if self.draining:
            reasons.append("The service is stopping.")
        reasons += [worker.problem for worker in self.device_workers if not worker.is_remote and worker.problem]
        if not self._answers:
            reasons += self._cluster.problems()
        return (*reasons, *self.models.unready_reasons())

    @property
    def _answers(self) -> bool:
        """Whether some device answers requests, or is there once there are some."""
        return self._cluster.waits_for_work or any(worker.serves for worker in self.device_workers)

    def missing_workers(self) -> str | None:
        """Return the sentence that says so where requests wait for a worker of a cluster; None where they do not."""
        if not self._cluster.workers or any(worker.serves for worker in self.device_workers):
            return None
        return "No worker of the cluster is there."

    def _backlog(self) -> Backlog:
        queues = [worker.queue for worker in self.device_workers]
        return Backlog(sum(len(queue.jobs) for queue in queues), sum(queue.expected_seconds for queue in queues))

    def measure_disks(self) -> dict[str, DiskUsage]:
        """Return what is kept on disk, by its kind; what cannot be measured now is left out."""
        usages = {}
        for kind, measure in self.disk_usages.items():
            with suppress(StackSegError, OSError):
                usages[kind] = measure()
        return usages

    def degradations(self) -> tuple[str, ...]:
        """Return what is wrong though the service is ready, one sentence each."""
        workers = self._cluster.problems() if self._answers else ()
        missing = (f"Files are read without {layer}: {reason}." for layer, reason in self.reader.missing.items())
        return (*self.models.degradations(), *workers, *missing)

    def estimate(self, spec: ModelSpec, volume: Extent, options: Options) -> Estimate:
        """Estimate windows and memory of a segmentation. Memory is a guess for a model that was never loaded.

        Raises BadParameter and TooLarge.
        """
        loaded = self.models.loaded(spec.name)
        estimator = loaded.estimator if loaded else self.device_workers[0].estimator(spec)
        return estimator.estimate(volume, options)

    def estimate_seconds(self, model: str, windows: int, caller: str | None = None) -> float | None:
        """Estimate the seconds until so many windows of a model would be done; None before any of it were timed."""
        queue = self.reserve(model, caller).device_worker.queue
        seconds = queue.expect(model, windows)
        return None if seconds is None else queue.expected_seconds + seconds

    def execution_settings(self, model: str) -> dict[str, Any]:
        """Return what decides about labels beside the model and the request: version, windows, engines in use.

        Another process that runs the model with the same settings returns an equal value. The engines of a model that
        was never loaded are not known yet.
        """
        engines = {worker.engines[model] for worker in self.device_workers if model in worker.engines}
        return {"version": self._version, "windows": self._window_settings, "engines": sorted(engines)}

    def reserve(self, model: str, caller: str | None = None) -> Reservation:
        """Choose the device that should answer a caller's request for this model first."""
        first, *others = self.device_workers
        # With one device nothing has to be compared.
        chosen = min(self.device_workers, key=lambda worker: worker.routing_cost(model, caller)) if others else first
        return Reservation(chosen, model)

    def submit(
        self,
        spec: ModelSpec,
        volume: Volume | Series,
        options: Options,
        finish: Callable[[Result], T],
        caller: str | None = None,
    ) -> Job[T]:
        """Queue a segmentation, which begins once the model is loaded. `finish` runs in the thread that segmented.

        Raises BadParameter, TooLarge, QueueFull or NotReady.
        """
        points = len(volume.times) if isinstance(volume, Series) else 1
        windows = points * self.estimate(spec, volume, options).windows
        reservation = self.reserve(spec.name, caller)

        def work(job: Job[T]) -> T:
            return finish(reservation.segment(job, volume, options))

        needs = partial(reservation.needs, volume, options)
        job: Job[T] = Job(spec.name, work, windows=windows, needs=needs, ready=False, owner=caller)
        reservation.device_worker.queue.offer(job)
        reservation.take(job)
        return job

    def _cancel_requests(self) -> None:
        for worker in self.device_workers:
            worker.cancel_requests()

    def _register_gauges(self) -> None:
        watch, watch_each = self.metrics.watch, self.metrics.watch_each
        watch("stackseg_waiting", "Requests that wait for the device.", lambda: self.waiting)
        watch("stackseg_running", "Requests that are worked on.", lambda: len(self.running))
        watch("stackseg_scratch_bytes", "Bytes on disk that requests hold.", lambda: float(self.scratch_space.used))
        watch("stackseg_cache_bytes", "Bytes of earlier results.", lambda: float(self.result_cache.nbytes))
        watch(
            "stackseg_ready",
            "1 once the models that are loaded at start are warm.",
            lambda: float(not self.unready_reasons()),
        )
        watch(
            "stackseg_compiled_graphs",
            "Graphs compiled so far; only loading a model adds some.",
            torch_compile.count_graphs,
        )
        watch(
            "stackseg_recompilations",
            "Graphs that were compiled while no model was loaded; there should be none.",
            lambda: self._loading_lock.recompilations,
        )
        watch(
            "stackseg_reader_kills",
            "Processes that were killed while they read a file, most likely for lack of memory on the host.",
            lambda: float(self.reader.kills),
        )
        watch_each("stackseg_trainings", "Trainings that run and wait.", "state", lambda: {**self.count_trainings()})
        watch_each(
            "stackseg_disk_used_bytes",
            "Bytes of files of each kind.",
            "files",
            lambda: {kind: float(usage.used) for kind, usage in self.measure_disks().items()},
        )
        watch_each(
            "stackseg_disk_free_bytes",
            "Free bytes of the disk that they lie on.",
            "files",
            lambda: {kind: float(usage.free) for kind, usage in self.measure_disks().items()},
        )
        watch_each(
            "stackseg_loaded_models",
            "Models that are loaded, by device.",
            "device",
            lambda: {worker.name: float(len(worker.loaded_models)) for worker in self.device_workers},
        )
        watch_each(
            "stackseg_loaded_bytes",
            "Memory that they take.",
            "device",
            lambda: {worker.name: float(worker.loaded_bytes) for worker in self.device_workers},
        )
        watch_each("stackseg_workers", "Workers of the cluster.", "state", lambda: self._cluster.states)
        watch_each(
            "stackseg_gpu_memory_used_bytes",
            "Of each GPU, by all processes.",
            "gpu",
            lambda: self._gpu_bytes("memory_used"),
        )
        watch_each("stackseg_gpu_memory_total_bytes", "Of each GPU.", "gpu", lambda: self._gpu_bytes("memory_total"))

    def _gpu_bytes(self, field: str) -> dict[str, float]:
        """Return the bytes in this field of every GPU that reports it, by index, on other hosts after their name."""
        values = {str(gpu.index): getattr(gpu, field) for gpu in hardware.gpus()}
        for other in self.hosts:
            values |= {f"{other.host}:{gpu.index}": getattr(gpu, field) for gpu in other.gpus}
        return {index: float(value) for index, value in values.items() if value is not None}
