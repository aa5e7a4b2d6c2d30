"""What lives as long as the process: settings, models, the queue and its workers, the device, the readers of files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from service import hardware, measurements, repository
from service.cache import ResultCache
from service.config import Settings
from service.device import Device, Share
from service.engine import compiled
from service.errors import BrokenModel, ConfigError, DeviceLost, NotReady, OutOfStorage, StackSegError
from service.formats import tiff
from service.formats.sandbox import Reader
from service.jobs import Free, Job, JobQueue, Needs
from service.metrics import Metrics
from service.references import References
from service.repository import ModelSpec
from service.segmenter import Result, Segmenter
from service.store import Outcome
from service.volume import Description, Options, Segmentation, Selection, Volume
from service.watchdog import Watchdog
from service.worker import Worker

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
READERS = 2
# What computes stops before its next batch of windows; what compiles cannot be stopped, and is not waited for.
JOIN_SECONDS = 4.0
FOLDER_PREFIX = "stackseg-"
# Says that a folder is ours to delete; others may choose the same beginning of a name.
MARKER = ".stackseg-scratch"

State = Literal["loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """Where a model stands. `segmenter` once it is ready, `problem` where it failed; `spec` unless unreadable."""

    name: str
    state: State
    spec: ModelSpec | None = None
    segmenter: Segmenter | None = None
    problem: str | None = None


class Runtime:
    """Owns the threads and child processes. `start` returns at once, models become ready one after the other.

    `load` makes a segmenter of a model; it is called in the device's thread. `root` is this process's own folder, and
    goes with it; `scratch`, inside it, has a folder per request. Raises ConfigError for a device or a folder that is
    not there.
    """

    def __init__(self, settings: Settings, load: Callable[[ModelSpec, Settings], Segmenter] = Segmenter) -> None:
        device = hardware.choose_device(settings.device.name)
        on_host = device.type == "cpu"
        limits = settings.limits
        at_once = min(limits.at_once, limits.waiting + 1)
        self.settings = settings
        self.references = References(settings.references)
        self.metrics = Metrics()
        self.queue = JobQueue(
            limits.waiting,
            at_once,
            lambda: Free(hardware.available_memory(), None if on_host else hardware.free_bytes(device)),
        )
        self.root = _scratch_parent(settings) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.scratch = self.root / "requests"
        self.cache: ResultCache[tuple[Outcome, str]] = ResultCache(self.root / "cache", settings.limits.cache_bytes)
        self.readers = ThreadPoolExecutor(READERS, "read")
        self._make_segmenter = load
        self._started = time.monotonic()
        self._reader: Reader
        self._models: dict[str, ModelState] = {}
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._device = Device("device")
        self._worker = Worker("request", self.queue.take, at_once)
        self._watchdog = Watchdog(
            lambda: self._device.pulse,
            lambda: self._device.alive,
            batch_seconds=settings.watchdog.batch_seconds,
            grace_seconds=settings.watchdog.grace_seconds,
        )
        self._draining = False
        self._patience: threading.Timer | None = None

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        """Read the model repository and let the device load and warm up every model."""
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
        self._show_gauges()
        for state in self._read_models():
            self._models[state.name] = state
            if state.spec is not None:
                self.queue.put(self._load(state.spec))
        self._device.start()
        self._worker.start()
        self._watchdog.start()

    def drain(self) -> None:
        """Stop being ready. What was begun may still finish, but not take longer than server.drain_seconds."""
        if self._draining:
            return
        self._draining = True
        self._watchdog.stop()
        self._patience = threading.Timer(self.settings.server.drain_seconds, self._give_up)
        self._patience.daemon = True
        self._patience.start()

    def stop(self) -> None:
        """Give up what still runs, end threads and child processes, delete what is left on disk."""
        self._draining = True
        self._watchdog.stop()
        if self._patience is not None:
            self._patience.cancel()
        self._give_up()
        self._worker.join(JOIN_SECONDS)
        self._device.close()
        if not (self._device.join(JOIN_SECONDS) and self._worker.join(JOIN_SECONDS)):
            log.warning("the device is still busy after %s s; leaving it behind", JOIN_SECONDS)
        self._reader.close()
        self.readers.shutdown()
        discard(self.root)
        os.close(self._hold)

    def _give_up(self) -> None:
        self.queue.close()
        self.queue.cancel_all()

    @property
    def draining(self) -> bool:
        """Whether the service was told to stop."""
        return self._draining

    @property
    def ended(self) -> bool:
        """Whether nothing is worked on any more, and nothing ever will be."""
        return not self._worker.alive

    def make_folder(self) -> Path:
        """A new folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def admit(self) -> None:
        """Raise NotReady or QueueFull if a request that arrived now would be refused after its upload."""
        if self._draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        self.queue.check()

    @property
    def models(self) -> tuple[ModelState, ...]:
        """Every model of the repository, in the order of their names."""
        with self._lock:
            return tuple(self._models.values())

    def obstacles(self) -> tuple[str, ...]:
        """Why the service is not ready, one sentence each; empty when it is."""
        reasons = [self._problem] if self._problem else []
        if self._draining:
            reasons.append("The service is stopping.")
        if self._watchdog.problem is not None:
            reasons.append(self._watchdog.problem)
        elif not self._device.alive:
            reasons.append("The thread that owns the device is not running.")
        for model in self.models:
            if model.state == "loading":
                reasons.append(f"{model.name} is being loaded and warmed up.")
            elif model.state == "failed":
                # Health is open to everybody, and the problem may tell of paths.
                reasons.append(f"{model.name} cannot be served; GET /models and the log say why.")
        return tuple(reasons)

    def model(self, name: str | None) -> ModelState:
        """The model of that name; None: the configured default, or the first. Raises UnknownModel."""
        return repository.choose({model.name: model for model in self.models}, name, self.settings.models.default)

    def segmenter(self, name: str | None) -> Segmenter:
        """The ready model of that name. Raises UnknownModel, NotReady, BrokenModel."""
        model = self.model(name)
        if model.state == "failed":
            raise BrokenModel(f"The model {model.name} cannot be served; its operator finds the reason in the log.")
        if model.segmenter is None:
            raise NotReady(f"The model {model.name} is still being loaded; try again in a few seconds.")
        return model.segmenter

    def inspect(self, path: Path, selection: Selection, *, shared: bool = False) -> Description:
        """What the file says of itself; see `service.formats.sandbox.Reader`."""
        return self._reader.inspect(path, selection, shared=shared)

    def read(self, path: Path, selection: Selection, scratch: Path, *, shared: bool = False) -> Volume:
        """The selected part of the file; see `service.formats.sandbox.Reader`."""
        return self._reader.read(path, selection, scratch, shared=shared)

    def submit(self, segmenter: Segmenter, volume: Volume, options: Options) -> Job[Result]:
        """Let a worker segment the volume. Raises BadParameter, QueueFull or NotReady, at once."""
        needed = segmenter.estimate(volume, options)

        def work(job: Job[Result]) -> Result:
            return self.segment(job, segmenter, volume, options)

        needs = Needs(needed.host_bytes, needed.device_bytes, needed.sw_batch_size)
        job: Job[Result] = Job(segmenter.spec.name, work, windows=needed.windows, needs=lambda: needs)
        self.queue.offer(job)
        return job

    def segment(self, job: Job[Result], segmenter: Segmenter, volume: Volume, options: Options) -> Result:
        """The work of a job, in a worker's thread. Raises what `Segmenter.segment` raises."""
        name = segmenter.spec.name

        def count(share: Share) -> None:
            self.metrics.count_batch(name, share.windows, share.slots)
            job.device_seconds += share.seconds

        run = partial(self._device.run, due=job.due, share=count)
        try:
            result = segmenter.segment(volume, options, cancelled=job.cancelled, progress=job.advance, run=run)
        except DeviceLost as error:
            self._watchdog.give_up(str(error))
            raise
        self.metrics.count_fallbacks(name, result.fallbacks)
        self.metrics.count_recomputed(name, int(result.recomputed))
        return result

    def write(self, segmentation: Segmentation, path: Path) -> None:
        """Write the result as OME-TIFF; see `service.formats.tiff.write`."""
        tiff.write(segmentation, path)

    def measure(self, segmentation: Segmentation, volume: Volume, path: Path) -> None:
        """Write a table of the objects as CSV; see `service.measurements.measure`."""
        measurements.write_csv(measurements.measure(segmentation, volume), path)

    def _show_gauges(self) -> None:
        watch = self.metrics.watch
        watch("stackseg_waiting", "Requests that wait for the device.", lambda: self.queue.waiting)
        watch("stackseg_running", "Requests that are worked on.", lambda: len(self.queue.running))
        watch("stackseg_cache_bytes", "Bytes of earlier results.", lambda: float(self.cache.nbytes))
        watch("stackseg_ready", "1 once every model is warm.", lambda: float(not self.obstacles()))
        watch("stackseg_compiled_graphs", "Graphs compiled so far; it stays the same once ready.", compiled.graphs)
        self.metrics.watch_each(
            "stackseg_gpu_memory_used_bytes", "Of each GPU, by all processes.", "gpu", lambda: _gpu_bytes("memory_used")
        )
        self.metrics.watch_each(
            "stackseg_gpu_memory_total_bytes", "Of each GPU.", "gpu", lambda: _gpu_bytes("memory_total")
        )

    def _read_models(self) -> list[ModelState]:
        models = self.settings.models
        try:
            folders = repository.model_folders(models.folder, models.serve)
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
        return ModelState(spec.name, "loading", spec)

    def _load(self, spec: ModelSpec) -> Job[Segmenter]:
        """The job that loads a model; however it ends, the model's state tells."""

        def load() -> Segmenter:
            segmenter = self._make_segmenter(spec, self.settings)
            segmenter.warm_up()
            return segmenter

        def work(_job: Job[Segmenter]) -> Segmenter:
            return self._device.call(load)

        def note(future: Future[Segmenter]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            state = _ready(spec, future.result()) if error is None else _failed(spec, error)
            with self._lock:
                self._models[spec.name] = state

        job: Job[Segmenter] = Job(f"load {spec.name}", work, alone=True)
        job.future.add_done_callback(note)
        return job


def _gpu_bytes(field: str) -> dict[str, float]:
    """A number of bytes of every GPU that tells it."""
    found = {str(gpu.index): getattr(gpu, field) for gpu in hardware.gpus()}
    return {index: float(value) for index, value in found.items() if value is not None}


def _ready(spec: ModelSpec, segmenter: Segmenter) -> ModelState:
    report = segmenter.report()
    how = f"{report.engine}, {report.precision}, {report.device}, warm-up {report.warm_up_seconds:.1f} s"
    log.info("%s is ready: %s", spec.identifier, how)
    return ModelState(spec.name, "ready", spec, segmenter)


def _failed(spec: ModelSpec, error: BaseException) -> ModelState:
    problem = str(error) if isinstance(error, StackSegError) else f"{type(error).__name__}: {error}"
    log.error("%s cannot be served: %s", spec.identifier, problem)
    return ModelState(spec.name, "failed", spec, problem=problem)


@contextmanager
def storage() -> Iterator[None]:
    """A full disk is nobody's fault: OSError -> OutOfStorage; any other OSError passes through."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise OutOfStorage("The disk that holds uploads is full; try again later, or send less.") from error


def sweep(parent: Path) -> None:
    """Delete the folders of services that were killed: those that carry the marker and whose lock nobody holds."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_marked(hold):
                discard(folder)
        except BlockingIOError:
            continue
        finally:
            os.close(hold)


def discard(folder: Path) -> None:
    """Delete a held folder; the marker goes last, so that what a kill leaves of it is swept by the next service."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: int) -> bool:
    """Whether an open folder holds our marker, and both are this user's."""
    try:
        marker = os.stat(MARKER, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode) and marker.st_uid == os.fstat(folder).st_uid == os.getuid()


def make_held_folder(folder: Path) -> int:
    """Make a folder that `sweep` spares as long as the returned descriptor is open."""
    folder.mkdir(mode=0o700)
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(hold, fcntl.LOCK_EX)
    # Only now may it be swept: whoever gets the lock of a marked folder knows that its owner is gone.
    (folder / MARKER).touch(mode=0o600)
    return hold


def _scratch_parent(settings: Settings) -> Path:
    parent = settings.server.scratch_folder or Path(tempfile.gettempdir())
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise ConfigError(f"server.scratch_folder: {parent} is not a folder that this process may write to.")
    return parent
