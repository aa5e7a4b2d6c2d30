"""What lives as long as the process: settings, models, devices with their queues, the readers of files."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from service import hardware, measurements, repository
from service.cache import ResultCache
from service.config import Settings
from service.engine import compiled
from service.errors import BrokenModel, ConfigError, NotReady, OutOfStorage
from service.formats import tiff
from service.formats.sandbox import Reader
from service.jobs import Job
from service.metrics import Metrics
from service.planning import Estimate, Outlook
from service.references import References
from service.repository import ModelSpec
from service.segmenter import Result, Segmenter
from service.station import Load, Seat, Station
from service.store import Outcome
from service.volume import Description, Extent, Options, Segmentation, Selection, Volume

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
READERS = 2
# What computes stops before its next batch of windows; what compiles cannot be stopped, and is not waited for.
JOIN_SECONDS = 4.0
FOLDER_PREFIX = "stackseg-"
# Says that a folder is ours to delete; others may choose the same beginning of a name.
MARKER = ".stackseg-scratch"

State = Literal["unloaded", "loading", "ready", "failed"]

log = logging.getLogger(__name__)


class ModelState(NamedTuple):
    """Where a model stands.

    state      unloaded until somebody asks for it
    spec       None where the folder cannot be read
    segmenter  one that is loaded; `nbytes` of it, and when it was last `used` (on the clock of `time.time`)
    problem    why it failed
    """

    name: str
    state: State
    spec: ModelSpec | None = None
    segmenter: Segmenter | None = None
    problem: str | None = None
    nbytes: int | None = None
    used: float | None = None


class Runtime:
    """Owns the threads and child processes. `start` returns at once, models become ready one after the other.

    `load` makes a segmenter of a model. `root` is this process's own folder, and goes with it; `scratch`, inside it,
    has a folder per request. Raises ConfigError for a device or a folder that is not there.
    """

    def __init__(self, settings: Settings, load: Load = Segmenter) -> None:
        self.settings = settings
        self.references = References(settings.references)
        self.metrics = Metrics()
        self.station = Station(settings, load, self.metrics, threading.Lock())
        self.root = _scratch_parent(settings) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        self.scratch = self.root / "requests"
        self.cache: ResultCache[tuple[Outcome, str]] = ResultCache(self.root / "cache", settings.limits.cache_bytes)
        self.readers = ThreadPoolExecutor(READERS, "read")
        self._started = time.monotonic()
        self._reader: Reader
        # What was found in the repository; whether it is loaded the station knows.
        self._found: dict[str, ModelState] = {}
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
        self._show_gauges()
        self._found = {state.name: state for state in self._read_models()}
        specs = {name: state.spec for name, state in self._found.items() if state.spec is not None}
        self._first = tuple(name for name in specs if name in self._wanted_first())
        self.station.start(specs, self._first)

    def drain(self) -> None:
        """Stop being ready. What was begun may still finish, but not take longer than server.drain_seconds."""
        if self._draining:
            return
        self._draining = True
        self.station.watchdog.stop()
        self._patience = threading.Timer(self.settings.server.drain_seconds, self.station.give_up)
        self._patience.daemon = True
        self._patience.start()

    def stop(self) -> None:
        """Give up what still runs, end threads and child processes, delete what is left on disk."""
        self._draining = True
        self.station.watchdog.stop()
        if self._patience is not None:
            self._patience.cancel()
        self.station.give_up()
        if not self.station.stop(JOIN_SECONDS):
            log.warning("the device is still busy after %s s; leaving it behind", JOIN_SECONDS)
        self._reader.close()
        self.readers.shutdown()
        discard(self.root)
        os.close(self._hold)

    @property
    def draining(self) -> bool:
        """Whether the service was told to stop."""
        return self._draining

    @property
    def ended(self) -> bool:
        """Whether nothing is worked on any more, and nothing ever will be."""
        return self.station.ended

    def make_folder(self) -> Path:
        """A new folder for one request."""
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def admit(self) -> None:
        """Raise NotReady or QueueFull if a request that arrived now would be refused after its upload."""
        if self._draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        self.station.queue.check()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return self.station.queue.waiting

    @property
    def running(self) -> tuple[Job[Any], ...]:
        """The requests that are worked on."""
        return self.station.queue.running

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
        if self.station.problem is not None:
            reasons.append(self.station.problem)
        starting, problems = self.station.residents.starting, self.station.residents.problems
        for name, found in self._found.items():
            if name in starting:
                reasons.append(f"{name} is being loaded and warmed up.")
            elif found.state == "failed" or (name in self._first and name in problems):
                # Health is open to everybody, and the problem may tell of paths.
                reasons.append(f"{name} cannot be served; GET /models and the log say why.")
        return tuple(reasons)

    def model(self, name: str | None) -> ModelState:
        """The model of that name; None: the configured default, or the first. Raises UnknownModel."""
        return self._now(repository.choose(self._found, name, self.settings.models.default))

    def spec(self, name: str | None) -> ModelSpec:
        """What is true of the model that answers. Raises UnknownModel, BrokenModel, and NotReady during the start."""
        spec = self.served(name)
        if spec.name in self.station.residents.starting:
            raise NotReady(f"The model {spec.name} is still being loaded; try again in a few seconds.")
        return spec

    def served(self, name: str | None) -> ModelSpec:
        """The same for those who can wait. Raises UnknownModel and BrokenModel."""
        model = self.model(name)
        if model.state == "failed" or model.spec is None:
            raise BrokenModel(f"The model {model.name} cannot be served; its operator finds the reason in the log.")
        return model.spec

    def segmenter(self, name: str | None) -> Segmenter:
        """The model of that name as it is loaded. Raises what `spec` raises, and NotReady where it is not loaded."""
        spec = self.spec(name)
        segmenter = self.station.residents.look(spec.name)
        if segmenter is None:
            raise NotReady(f"The model {spec.name} is not loaded.")
        return segmenter

    def estimate(self, spec: ModelSpec, volume: Extent, options: Options) -> Estimate:
        """What segmenting it would take. Of a model that is not loaded only windows are known, and memory is guessed.

        Raises BadParameter and TooLarge.
        """
        segmenter = self.station.residents.look(spec.name)
        return (segmenter or Outlook(spec, self.settings)).estimate(volume, options)

    def inspect(self, path: Path, selection: Selection, *, shared: bool = False) -> Description:
        """What the file says of itself; see `service.formats.sandbox.Reader`."""
        return self._reader.inspect(path, selection, shared=shared)

    def read(self, path: Path, selection: Selection, scratch: Path, *, shared: bool = False) -> Volume:
        """The selected part of the file; see `service.formats.sandbox.Reader`."""
        return self._reader.read(path, selection, scratch, shared=shared)

    def seat(self, model: str) -> Seat:
        """Where a request for this model should be worked on."""
        return Seat(self.station, model)

    def submit(self, spec: ModelSpec, volume: Volume, options: Options) -> Job[Result]:
        """Let a worker segment the volume, once the model is loaded. Raises BadParameter, QueueFull or NotReady."""
        windows = self.estimate(spec, volume, options).windows
        seat = self.seat(spec.name)

        def work(job: Job[Result]) -> Result:
            return seat.segment(job, volume, options)

        needs = partial(seat.needs, volume, options)
        job: Job[Result] = Job(spec.name, work, windows=windows, needs=needs, ready=False)
        seat.station.queue.offer(job)
        seat.take(job)
        return job

    def write(self, segmentation: Segmentation, path: Path) -> None:
        """Write the result as OME-TIFF; see `service.formats.tiff.write`."""
        tiff.write(segmentation, path)

    def measure(self, segmentation: Segmentation, volume: Volume, path: Path) -> None:
        """Write a table of the objects as CSV; see `service.measurements.measure`."""
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
        watch("stackseg_compiled_graphs", "Graphs compiled so far; only loading a model adds some.", compiled.graphs)
        standings = self.station.residents
        watch("stackseg_loaded_models", "Models that are loaded.", lambda: float(len(standings.standings)))
        watch(
            "stackseg_loaded_bytes",
            "Memory that they take.",
            lambda: float(sum(one.nbytes for one in standings.standings.values())),
        )
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
        return ModelState(spec.name, "unloaded", spec)

    def _wanted_first(self) -> frozenset[str]:
        """The models that are loaded at start; notes a problem for names that are not served."""
        models = self.settings.models
        if models.load == "all":
            return frozenset(self._found)
        default = models.default or repository.usual(self._found)
        names = {*models.load, *([default] if default else [])}
        if self._found and (unknown := sorted(names - self._found.keys())):
            self._problem = f"models.load or models.default names {unknown[0]}, which is not served."
            log.error("%s", self._problem)
        return frozenset(names)

    def _now(self, found: ModelState) -> ModelState:
        """With where it stands at the station."""
        if found.spec is None:
            return found
        residents = self.station.residents
        segmenter, standing = residents.look(found.name), residents.standings.get(found.name)
        if segmenter is not None and standing is not None and found.name not in residents.starting:
            return found._replace(state="ready", segmenter=segmenter, nbytes=standing.nbytes, used=standing.used)
        if (problem := residents.problems.get(found.name)) is not None:
            return found._replace(state="failed", problem=problem)
        return found._replace(state="loading") if residents.is_awaited(found.name) else found


def _gpu_bytes(field: str) -> dict[str, float]:
    """A number of bytes of every GPU that tells it."""
    found = {str(gpu.index): getattr(gpu, field) for gpu in hardware.gpus()}
    return {index: float(value) for index, value in found.items() if value is not None}


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
