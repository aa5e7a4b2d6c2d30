"""What lives as long as the process: settings, models, the device's queue and worker, the readers of files."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from service import repository
from service.config import Settings
from service.errors import BrokenModel, ModelError, NotReady, StackSegError, UnknownModel
from service.formats import tiff
from service.formats.sandbox import Reader
from service.jobs import Job, JobQueue
from service.metrics import Metrics
from service.repository import ModelSpec
from service.segmenter import Result, Segmenter
from service.volume import Description, Options, Segmentation, Selection, Volume
from service.worker import Worker

# Beyond its share of the decoded volume, a child that reads a file may need codec tables and one decoded page.
READER_BYTES = 2 * 2**30
JOIN_SECONDS = 10.0

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
    """Owns the threads and child processes. `start` returns at once, models become ready one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.queue = JobQueue(settings.limits.waiting)
        self.scratch = Path(tempfile.mkdtemp(prefix="stackseg-", dir=settings.server.scratch_folder))
        self._started = time.monotonic()
        self._reader = Reader(
            memory_bytes=READER_BYTES,
            seconds=settings.limits.read_seconds,
            decoded_bytes=settings.limits.decoded_bytes,
        )
        self._models: dict[str, ModelState] = {}
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._worker = Worker("device", self.queue.take)
        self._draining = False

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        """Read the model repository and let the worker load and warm up every model."""
        self.metrics.watch("stackseg_waiting", "Requests that wait for the device.", lambda: self.queue.waiting)
        for state in self._read_models():
            self._models[state.name] = state
            if state.spec is not None:
                self.queue.put(Job(f"load {state.name}", self._load(state.spec)))
        self._worker.start()

    def drain(self) -> None:
        """Stop being ready; what runs or waits still finishes."""
        self._draining = True

    def stop(self) -> None:
        """Give up what still runs, end threads and child processes, delete what is left on disk."""
        self.drain()
        self.queue.close()
        self.queue.cancel_all()
        if not self._worker.join(JOIN_SECONDS):
            log.warning("the worker is still busy after %s s; leaving it behind", JOIN_SECONDS)
        self._reader.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

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
        if not self._worker.alive:
            reasons.append("The worker that owns the device is not running.")
        for model in self.models:
            if model.state == "loading":
                reasons.append(f"{model.name} is being loaded and warmed up.")
            elif model.state == "failed":
                reasons.append(f"{model.name} cannot be served: {model.problem}")
        return tuple(reasons)

    def model(self, name: str | None) -> ModelState:
        """The model of that name; None: the configured default, or the first. Raises UnknownModel."""
        models = {model.name: model for model in self.models}
        wanted = name or self.settings.models.default or next(iter(models), None)
        if wanted is None or wanted not in models:
            raise UnknownModel(f"There is no model {wanted!r}; served are: {', '.join(models) or 'none'}.")
        return models[wanted]

    def segmenter(self, name: str | None) -> Segmenter:
        """The ready model of that name. Raises UnknownModel, NotReady, BrokenModel."""
        if self._draining:
            raise NotReady("The service is stopping; send the request again when it is back.")
        model = self.model(name)
        if model.state == "failed":
            raise BrokenModel(f"The model {model.name} cannot be served; its operator finds the reason in the log.")
        if model.segmenter is None:
            raise NotReady(f"The model {model.name} is still being loaded; try again in a few seconds.")
        return model.segmenter

    def inspect(self, path: Path, selection: Selection) -> Description:
        """What the file says of itself; see `service.formats.sandbox.Reader`."""
        return self._reader.inspect(path, selection)

    def read(self, path: Path, selection: Selection, scratch: Path) -> Volume:
        """The selected part of the file; see `service.formats.sandbox.Reader`."""
        return self._reader.read(path, selection, scratch)

    def submit(self, segmenter: Segmenter, volume: Volume, options: Options) -> Job[Result]:
        """Let the worker segment the volume. Raises QueueFull or NotReady, at once."""

        def work(job: Job[Result]) -> Result:
            return segmenter.segment(volume, options, cancelled=job.cancelled, progress=job.advance)

        job: Job[Result] = Job(segmenter.spec.name, work)
        self.queue.offer(job)
        return job

    def write(self, segmentation: Segmentation, path: Path) -> None:
        """Write the result as OME-TIFF; see `service.formats.tiff.write`."""
        tiff.write(segmentation, path)

    def _read_models(self) -> list[ModelState]:
        models = self.settings.models
        try:
            folders = repository.model_folders(models.folder, models.serve)
        except BrokenModel as error:
            self._problem = str(error)
            log.error("%s", error)  # noqa: TRY400 - the message says it all
            return []
        return [self._read_model(folder) for folder in folders]

    @staticmethod
    def _read_model(folder: Path) -> ModelState:
        try:
            spec = repository.read_spec(folder)
        except BrokenModel as error:
            log.error("%s", error)  # noqa: TRY400
            return ModelState(folder.name, "failed", problem=str(error))
        return ModelState(spec.name, "loading", spec)

    def _load(self, spec: ModelSpec) -> Callable[[Job[None]], None]:
        def work(_job: Job[None]) -> None:
            self._put(self._warm(spec))

        return work

    def _warm(self, spec: ModelSpec) -> ModelState:
        began = time.perf_counter()
        try:
            segmenter = Segmenter(spec, self.settings)
            segmenter.warm_up()
        except (StackSegError, RuntimeError, MemoryError, OSError) as error:
            log.exception("%s cannot be served", spec.identifier)
            problem = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            return ModelState(spec.name, "failed", spec, problem=problem)
        report = segmenter.report()
        seconds = time.perf_counter() - began
        log.info("%s ready on %s after %.1f s: %s, %s", spec.identifier, report.device, seconds, report.engine,
                 report.precision)  # fmt: skip
        return ModelState(spec.name, "ready", spec, segmenter)

    def _put(self, model: ModelState) -> None:
        with self._lock:
            self._models[model.name] = model
