"""What lives as long as the process: settings, models, devices with their queues, the readers of files."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from service.core import hardware
from service.core.config import Settings
from service.core.errors import BrokenModel, NotReady
from service.core.volume import Description, Extent, Options, Segmentation, Selection, Volume
from service.engine import torch_compile
from service.formats import tiff_writer
from service.formats.deflate import deflation
from service.formats.sandbox import Reader
from service.inference import measurements
from service.inference.estimate import Estimate
from service.inference.result import Result
from service.inference.segmenter import Segmenter
from service.models import repository
from service.models.spec import ModelSpec
from service.serving.device_worker import DeviceWorker, Load, Reservation, device_worker_settings
from service.serving.host_files import HostFiles
from service.serving.job import Job
from service.serving.job_store import AnswerMetadata
from service.serving.malloc_trim import MallocTrimmer
from service.serving.metrics import Metrics
from service.serving.model_cache import LoadedModel
from service.serving.result_cache import ResultCache
from service.serving.scratch import FOLDER_PREFIX, discard, make_held_folder, scratch_parent, sweep

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
READERS = 2
# Threads that do nothing but wait for one of these, so many that large files, which take turns, leave some for others.
WAITING_READERS = 32
# What computes stops before its next batch of windows; what compiles cannot be stopped, and is not waited for.
JOIN_SECONDS = 4.0

P = ParamSpec("P")
T = TypeVar("T")

State = Literal["unloaded", "loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """Where a model stands.

    state      unloaded until somebody asks for it
    spec       None where the folder cannot be read
    segmenter  one that is loaded
    problem    why it failed
    loaded     where it is loaded, by the name of the device
    """

    name: str
    state: State
    spec: ModelSpec | None = None
    segmenter: Segmenter | None = None
    problem: str | None = None
    loaded: Mapping[str, LoadedModel] = {}


class Threads(ThreadPoolExecutor):
    """So many threads that tell whether all of them are busy."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self._number, self._taken = number, 0
        self._counting = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether work would have to wait for a thread."""
        return self._taken >= self._number

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As that of any executor."""
        future = super().submit(fn, *args, **kwargs)
        self._count(1)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def _count(self, change: int) -> None:
        with self._counting:
            self._taken += change


class Runtime:
    """Owns the threads and child processes. `start` returns at once, models become ready one after the other.

    `load` makes a segmenter of a model. `root` is this process's own folder, and goes with it; `scratch`, inside it,
    has a folder per request. Raises ConfigError for a device or a folder that is not there.
    """

    def __init__(self, settings: Settings, load: Load = Segmenter) -> None:
        self.settings = settings
        self.references = HostFiles(settings.references)
        self.metrics = Metrics()
        self._turn = torch_compile.LoadingLock()
        self.device_workers = tuple(
            DeviceWorker(name, own, load, self.metrics, self._turn) for name, own in device_worker_settings(settings)
        )
        self.root = scratch_parent(settings) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.scratch = self.root / "requests"
        self._folders = itertools.count()
        self.cache: ResultCache[tuple[AnswerMetadata, str]] = ResultCache(
            self.root / "cache", settings.limits.cache_bytes
        )
        # Threads that wait for a process to read: files to be decoded may not keep others from being looked at.
        self.readers = Threads(WAITING_READERS, "read")
        self.lookers = ThreadPoolExecutor(WAITING_READERS, "look")
        # Looked up in files, which takes a millisecond.
        self._version = version("stackseg")
        self._windows = settings.windows.model_dump(mode="json")
        self._started = time.monotonic()
        self._reader: Reader
        self._trimmer = MallocTrimmer()
        # What was found in the repository; whether it is loaded the station knows.
        self._found: dict[str, ModelState] = {}
        # What is true of those that can be read, as JSON.
        self._facts: dict[str, str] = {}
        self._first: tuple[str, ...] = ()
        self._problem: str | None = None
        self._draining = False
        self._patience: threading.Timer | None = None

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        """Read the model repository, and load and warm up the models that are not left until they are asked for."""
        sweep(self.root.parent)
        self._hold = make_held_folder(self.root)
        self.scratch.mkdir()
        (self.root / "cache").mkdir()
        self._reader = Reader(
            memory_bytes=READER_BYTES,
            seconds=self.settings.limits.read_seconds,
            decoded_bytes=self.settings.limits.decoded_bytes,
            shared_bytes=self.settings.references.decoded_bytes,
            processes=READERS,
        )
        self._trimmer.start()
        self._show_gauges()
        self._found = {state.name: state for state in self._read_models()}
        specs = {name: state.spec for name, state in self._found.items() if state.spec is not None}
        self._facts = {name: spec.model_dump_json() for name, spec in specs.items()}
        self._first = tuple(name for name in specs if name in self._wanted_first())
        for worker in self.device_workers:
            worker.start(specs, self._first)

    def drain(self) -> None:
        """Stop being ready. What was begun may still finish, but not take longer than server.drain_seconds."""
        if self._draining:
            return
        self._draining = True
        for worker in self.device_workers:
            worker.watchdog.stop()
        self._patience = threading.Timer(self.settings.server.drain_seconds, self._give_up)
        self._patience.daemon = True
        self._patience.start()

    def stop(self) -> None:
        """Give up what still runs, end threads and child processes, delete what is left on disk."""
        self._draining = True
        for worker in self.device_workers:
            worker.watchdog.stop()
        if self._patience is not None:
            self._patience.cancel()
        self._give_up()
        for worker in self.device_workers:
            if not worker.stop(JOIN_SECONDS):
                log.warning("%s is still busy after %s s; leaving it behind", worker.name, JOIN_SECONDS)
        self._trimmer.stop()
        self._reader.close()
        self.readers.shutdown()
        self.lookers.shutdown()
        discard(self.root)
        os.close(self._hold)

    def _give_up(self) -> None:
        for worker in self.device_workers:
            worker.give_up()

    @property
    def draining(self) -> bool:
        """Whether the service was told to stop."""
        return self._draining

    @property
    def ended(self) -> bool:
        """Whether nothing is worked on any more, and nothing ever will be."""
        return all(worker.ended for worker in self.device_workers)

    def make_folder(self) -> Path:
        """A new folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def new_folder(self) -> Path:
        """Where a request may make a folder of its own; its name is that of no other process's either."""
        return self.scratch / f"{self.root.name}-{next(self._folders)}"

    def admit(self) -> None:
        """Raise NotReady or QueueFull if a request that arrived now would be refused after its upload."""
        if self._draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        free = next(
            (worker for worker in self.device_workers if not worker.queue.full),
            self.device_workers[0],
        )
        free.queue.check()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return sum(worker.queue.waiting for worker in self.device_workers)

    @property
    def running(self) -> tuple[Job[Any], ...]:
        """The requests that are worked on."""
        return tuple(job for worker in self.device_workers for job in worker.queue.running)

    @property
    def models(self) -> tuple[ModelState, ...]:
        """Every model of the repository, in the order of their names."""
        return tuple(self._now(found) for found in self._found.values())

    def obstacles(self) -> tuple[str, ...]:
        """Why the service is not ready, one sentence each; empty when it is.

        A model that cannot be loaded counts where its folder cannot be read, or where it was to be loaded at start.
        """
        reasons = [self._problem] if self._problem else []
        if self._draining:
            reasons.append("The service is stopping.")
        reasons += [worker.problem for worker in self.device_workers if worker.problem is not None]
        return (*reasons, *self._unready_models())

    def _unready_models(self) -> Iterator[str]:
        starting = {name for worker in self.device_workers for name in worker.model_cache.starting}
        failed = {name for worker in self.device_workers for name in worker.model_cache.problems}
        for name, found in self._found.items():
            if name in starting:
                yield f"{name} is being loaded and warmed up."
            elif found.state == "failed" or (name in self._first and name in failed):
                # Health is open to everybody, and the problem may tell of paths.
                yield f"{name} cannot be served; GET /models and the log say why."

    def model(self, name: str | None) -> ModelState:
        """The model of that name; None: the configured default, or the first. Raises UnknownModel."""
        return self._now(repository.select_model(self._found, name, self.settings.models.default))

    def spec(self, name: str | None) -> ModelSpec:
        """What is true of the model that answers. Raises UnknownModel, BrokenModel, and NotReady during the start."""
        spec = self.served(name)
        if all(spec.name in worker.model_cache.starting for worker in self.device_workers):
            raise NotReady(f"The model {spec.name} is still being loaded; try again in a few seconds.")
        return spec

    def served(self, name: str | None) -> ModelSpec:
        """The same for those who can wait. Raises UnknownModel and BrokenModel."""
        model = repository.select_model(self._found, name, self.settings.models.default)
        if self._loaded(model.name) is None:
            model = self._now(model)
        if model.state == "failed" or model.spec is None:
            raise BrokenModel(f"The model {model.name} cannot be served; its operator finds the reason in the log.")
        return model.spec

    def segmenter(self, name: str | None) -> Segmenter:
        """The model of that name as it is loaded. Raises what `spec` raises, and NotReady where it is not loaded."""
        spec = self.spec(name)
        segmenter = self._loaded(spec.name)
        if segmenter is None:
            raise NotReady(f"The model {spec.name} is not loaded.")
        return segmenter

    def estimate(self, spec: ModelSpec, volume: Extent, options: Options) -> Estimate:
        """What segmenting it would take. Of a model that was never loaded only windows are known; memory is guessed.

        Raises BadParameter and TooLarge.
        """
        loaded = self._loaded(spec.name)
        return (
            loaded.estimate(volume, options)
            if loaded
            else self.device_workers[0].estimator(spec).estimate(volume, options)
        )

    def inspect(
        self, source: Path | bytearray, selection: Selection, *, shared: bool = False, owner: str | None = None
    ) -> Description:
        """What the file says of itself; see `service.formats.sandbox.Reader`."""
        return self._reader.inspect(source, selection, shared=shared, owner=owner)

    @property
    def reads_memory(self) -> bool:
        """Whether a file that this process holds in memory can be read; not known, and False, before the first one."""
        return self._reader.opens

    def read(
        self,
        source: Path | bytearray,
        selection: Selection,
        scratch: Path,
        *,
        shared: bool = False,
        owner: str | None = None,
    ) -> Volume:
        """The selected part of the file; see `service.formats.sandbox.Reader`."""
        return self._reader.read(source, selection, scratch, shared=shared, owner=owner)

    def facts(self, model: str) -> str:
        """What is true of a served model wherever it runs, as JSON: the same for models that are alike in all of it."""
        return self._facts[model]

    def manner(self, model: str) -> dict[str, Any]:
        """What decides about labels beside a model and a request: what the operator chose, and how the model runs here.

        The same at another start that runs it likewise. Of a model that was never loaded only the first is known.
        """
        engines = {worker.manners[model] for worker in self.device_workers if model in worker.manners}
        return {"version": self._version, "windows": self._windows, "engines": sorted(engines)}

    def reservation(self, model: str) -> Reservation:
        """Where a request for this model should be worked on, as things are."""
        first, *others = self.device_workers
        return Reservation(
            min(self.device_workers, key=lambda worker: worker.reluctance(model)) if others else first,
            model,
        )

    def submit(self, spec: ModelSpec, volume: Volume, options: Options, finish: Callable[[Result], T]) -> Job[T]:
        """Let a worker segment the volume, once the model is loaded, and `finish` at once what does not take long.

        Raises BadParameter, QueueFull or NotReady.
        """
        windows = self.estimate(spec, volume, options).windows
        reservation = self.reservation(spec.name)

        def work(job: Job[T]) -> T:
            return finish(reservation.segment(job, volume, options))

        needs = partial(reservation.needs, volume, options)
        job: Job[T] = Job(spec.name, work, windows=windows, needs=needs, ready=False)
        reservation.device_worker.queue.offer(job)
        reservation.take(job)
        return job

    def write(self, segmentation: Segmentation, path: Path) -> None:
        """Write the result as OME-TIFF; see `service.formats.tiff_writer.write`."""
        tiff_writer.write(segmentation, path, compress=deflation.compress)

    def encode(self, segmentation: Segmentation) -> bytes | None:
        """The file that `write` would write, where it is small; see `service.formats.tiff_writer.encoded`."""
        return tiff_writer.encoded(segmentation, deflation.compress)

    def measure(self, segmentation: Segmentation, volume: Volume, path: Path) -> None:
        """Write a table of the objects as CSV; see `service.inference.measurements.measure`."""
        measurements.write_csv(measurements.measure(segmentation, volume), path)

    def _show_gauges(self) -> None:
        watch = self.metrics.watch
        watch("stackseg_waiting", "Requests that wait for the device.", lambda: self.waiting)
        watch("stackseg_running", "Requests that are worked on.", lambda: len(self.running))
        watch("stackseg_cache_bytes", "Bytes of earlier results.", lambda: float(self.cache.nbytes))
        watch(
            "stackseg_ready",
            "1 once the models that are loaded at start are warm.",
            lambda: float(not self.obstacles()),
        )
        watch(
            "stackseg_compiled_graphs",
            "Graphs compiled so far; only loading a model adds some.",
            torch_compile.count_graphs,
        )
        watch(
            "stackseg_recompilations",
            "Graphs that were compiled while no model was loaded; there should be none.",
            lambda: self._turn.recompilations,
        )
        each = self.metrics.watch_each
        each("stackseg_loaded_models", "Models that are loaded, by device.", "device", self._loaded_models)
        each("stackseg_loaded_bytes", "Memory that they take.", "device", self._loaded_bytes)
        each(
            "stackseg_gpu_memory_used_bytes", "Of each GPU, by all processes.", "gpu", lambda: _gpu_bytes("memory_used")
        )
        each("stackseg_gpu_memory_total_bytes", "Of each GPU.", "gpu", lambda: _gpu_bytes("memory_total"))

    def _loaded_models(self) -> dict[str, float]:
        return {worker.name: float(len(worker.model_cache.loaded_models)) for worker in self.device_workers}

    def _loaded_bytes(self) -> dict[str, float]:
        return {worker.name: float(worker.loaded_bytes) for worker in self.device_workers}

    def _read_models(self) -> list[ModelState]:
        models = self.settings.models
        try:
            folders = repository.find_model_folders(models.folder, models.serve)
        except BrokenModel as error:
            self._problem = str(error)
            log.error("%s", error)  # noqa: TRY400 - the message says it all
            return []
        found: dict[str, ModelState] = {}
        for folder in folders:
            state = self._read_model(folder)
            if state.name in found:
                problem = f"{folder}: the name {state.name!r} is taken by another folder; give one of them another."
                log.error("%s", problem)
                state = ModelState(state.name, "failed", problem=problem)
            found[state.name] = state
        return list(found.values())

    @staticmethod
    def _read_model(folder: Path) -> ModelState:
        try:
            spec = repository.read_spec(folder)
        except BrokenModel as error:
            log.error("%s", error)  # noqa: TRY400
            return ModelState(folder.name, "failed", problem=str(error))
        return ModelState(spec.name, "unloaded", spec)

    def _wanted_first(self) -> frozenset[str]:
        """The models that are loaded at start; notes a problem for names that are not served."""
        models = self.settings.models
        if models.load == "all":
            return frozenset(self._found)
        default = models.default or repository.default_name(self._found)
        names = {*models.load, *([default] if default else [])}
        if self._found and (unknown := sorted(names - self._found.keys())):
            self._problem = f"models.load or models.default names {unknown[0]}, which is not served."
            log.error("%s", self._problem)
        return frozenset(names)

    def _now(self, found: ModelState) -> ModelState:
        """With where it stands at the station."""
        if found.spec is None:
            return found
        name, everywhere = found.name, [worker.model_cache for worker in self.device_workers]
        segmenter = self._loaded(name)
        loaded = {
            worker.name: loaded_model
            for worker in self.device_workers
            if (loaded_model := worker.model_cache.loaded_models.get(name)) is not None
        }
        if segmenter is not None and loaded:
            return found._replace(state="ready", segmenter=segmenter, loaded=loaded)
        if any(model_cache.is_awaited(name) for model_cache in everywhere):
            return found._replace(state="loading")
        problem = next((model_cache.problems[name] for model_cache in everywhere if name in model_cache.problems), None)
        return found if problem is None else found._replace(state="failed", problem=problem)

    def _loaded(self, name: str) -> Segmenter | None:
        return next(filter(None, (worker.model_cache.look(name) for worker in self.device_workers)), None)


def _gpu_bytes(field: str) -> dict[str, float]:
    """A number of bytes of every GPU that tells it."""
    found = {str(gpu.index): getattr(gpu, field) for gpu in hardware.gpus()}
    return {index: float(value) for index, value in found.items() if value is not None}
