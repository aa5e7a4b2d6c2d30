"""Jobs that are answered later: accepted, run through the device's queue, kept, run again after a crash, forgotten."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from service.core.config import Settings
from service.core.errors import Cancelled, DeviceLost, NotFinished, OutOfStorage, ResultGone, StackSegError
from service.core.timing import Stages
from service.inference.result import Result
from service.serving.device_worker import Reservation
from service.serving.job import Job, Needs, Progress
from service.serving.job_store import INPUT, AnswerMetadata, JobRequest, JobStore, Record
from service.serving.parameters import Query
from service.serving.results import Pixels, ReceivedRequest, outcome_of, read_pixels, settle, write_answer
from service.serving.runtime import JOIN_SECONDS, Runtime
from service.serving.scratch import storage

WRITERS = 2
EXPIRY_SECONDS = 60.0

log = logging.getLogger(__name__)


class View(NamedTuple):
    """A job as its owner sees it: what is on disk, and what this process knows beyond that.

    position      1 for the job whose turn is next; None once it does not wait
    seconds_left  until the result is there; None where that cannot be told
    seconds       by stage, as far as the job has come
    loading       whether it waits for its model to be loaded
    """

    record: Record
    progress: Progress
    position: int | None = None
    seconds_left: float | None = None
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    loading: bool = False


class _ActiveJob:
    """A job that is not over, in this process. `folder` holds its decoded pixels."""

    def __init__(self, number: str, order: JobRequest, owner: str | None, reservation: Reservation) -> None:
        self.id, self.order, self.owner, self.reservation = number, order, owner, reservation
        self.query = Query.model_validate(order.parameters)
        self.stages = Stages()
        self.stages.add("receive", order.receive_seconds)
        self.folder: Path | None = None
        self.pixels: Pixels | None = None
        self.over = threading.Event()
        self.job: Job[Result]


class AsyncJobs:
    """Owns the jobs folder, and the threads that write results. All methods but `start` block for a disk at most.

    Raises ConfigError for a jobs folder that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: JobStore
        if settings.jobs.folder is not None:
            self._store = self._open(settings.jobs.folder)
        self._live: dict[str, _ActiveJob] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._runtime: Runtime
        self._writers: ThreadPoolExecutor
        self._expiry = threading.Thread(target=self._expire, name="expire", daemon=True)

    def start(self, runtime: Runtime) -> None:
        """Run again what an earlier process left behind. The runtime has to be started, and stopped after this."""
        self._runtime = runtime
        self._writers = ThreadPoolExecutor(WRITERS, "write")
        if self._settings.jobs.folder is None:
            self._store = self._open(runtime.root / "jobs")
        for record in self._store.recover():
            log.info("job %s of an earlier process runs again", record.id)
            live = self._prepare(record.id, record.order, record.owner)
            live.reservation.device_worker.queue.put(live.job)
            self._read_ahead(live)
        self._expiry.start()

    def stop(self) -> None:
        """Leave what waits on disk, let what runs finish within the time to drain, close the store."""
        with self._lock:
            lives = list(self._live.values())
        for live in lives:
            if live.job.state == "waiting":
                live.job.cancel()
        if self._runtime.draining:
            _await(lives, self._settings.server.drain_seconds)
        for live in lives:
            live.job.cancel()
        _await(lives, JOIN_SECONDS)
        self._stopped.set()
        self._writers.shutdown()
        if self._expiry.ident is not None:
            self._expiry.join()
        self._store.close()

    def make_incoming(self) -> Path:
        """A new folder for a file that arrives, for `submit`. A full disk raises OutOfStorage."""
        return self._store.make_incoming()

    def submit(self, received: ReceivedRequest, name: str, receive_seconds: float) -> View:
        """Accept a request in a folder of `make_incoming`; when this returns, the job outlives the process.

        The folder holds the file that arrived, as INPUT, or an empty one where the query names a file of the host: that
        is looked at now, and read when its turn comes. What can be known to be wrong without decoding a pixel is
        refused at once. Raises what `Runtime.inspect` and `Segmenter.estimate` raise, QueueFull, NotReady and
        OutOfStorage.
        """
        query, owner = received.query, received.caller
        spec = self._runtime.spec(query.model)
        file = self._runtime.inspect(received.source, query.selection, shared=query.input is not None, owner=owner)
        windows = self._runtime.estimate(spec, file, query.options).windows
        parameters = query.model_dump(mode="json", exclude_unset=True)
        order = JobRequest(spec.name, parameters, name, windows, receive_seconds)
        live = self._prepare(received.folder.name, order, owner)
        try:
            live.reservation.device_worker.queue.offer(live.job)
            with storage():
                self._store.accept(received.folder / INPUT, owner, order)
        except BaseException:
            live.job.cancel()
            raise
        self._read_ahead(live)
        return self.view(live.id, owner)

    def view(self, job: str, owner: str | None) -> View:
        """A job of this owner. Raises UnknownJob."""
        return self._view(self._store.find(job, owner))

    def of(self, owner: str | None, most: int) -> list[View]:
        """The newest jobs of this owner, newest first."""
        return [self._view(record) for record in self._store.of(owner, most)]

    def cancel(self, job: str, owner: str | None) -> None:
        """Give up a job that waits or runs; forget one that is over, and its result. Raises UnknownJob."""
        self._store.find(job, owner)
        if not self._store.cancel(job):
            self._store.delete(job)
            return
        with self._lock:
            live = self._live.get(job)
        if live is not None:
            live.job.cancel()

    def result(self, job: str, owner: str | None) -> tuple[BinaryIO, AnswerMetadata]:
        """The open file, which stays whole whatever happens to the job, and what is told beside it.

        Raises UnknownJob, NotFinished, ResultGone, and what a failed job failed with.
        """
        record = self._store.find(job, owner)
        if record.failure is not None:
            raise record.failure
        if record.state == "cancelled":
            raise ResultGone("The job was cancelled; post the stack again.")
        if record.outcome is None:
            raise NotFinished(f"The job is {record.state}; its result can be had once GET /jobs/{job} says done.")
        try:
            return self._store.result(job).open("rb"), record.outcome
        except FileNotFoundError:
            raise ResultGone("The result was deleted to make room for newer ones; post the stack again.") from None

    @property
    def keep_seconds(self) -> float:
        """How long a job is kept once it is over."""
        return self._settings.jobs.keep_hours * 3600

    def _open(self, folder: Path) -> JobStore:
        jobs = self._settings.jobs
        return JobStore(folder, quota_bytes=jobs.quota_bytes, keep_seconds=self.keep_seconds, attempts=jobs.attempts)

    def _view(self, record: Record) -> View:
        with self._lock:
            live = self._live.get(record.id)
        if record.over or live is None:
            done = record.order.windows if record.state == "done" else 0
            seconds = record.outcome.seconds if record.outcome else {}
            return View(record, Progress(done, record.order.windows), seconds=seconds)
        queue, job = live.reservation.device_worker.queue, live.job
        progress = job.progress if job.progress.total else Progress(0, record.order.windows)
        seconds = dict(live.stages.seconds)
        return View(record, progress, queue.position(job), queue.seconds_left(job), seconds, live.reservation.loading)

    def _prepare(self, number: str, order: JobRequest, owner: str | None) -> _ActiveJob:
        live = _ActiveJob(number, order, owner, self._runtime.reservation(order.model))
        work, needs = partial(self._segment, live), partial(self._needs, live)
        live.job = Job(order.model, work, windows=order.windows, needs=needs, ready=False)
        with self._lock:
            self._live[live.id] = live
        # By its id: the job would otherwise hold itself, and with it what it computed.
        live.job.future.add_done_callback(partial(self._settle, live.id))
        return live

    def _read_ahead(self, live: _ActiveJob) -> None:
        """Decode the file while others are computed; only then may the job take its turn."""
        self._runtime.readers.submit(self._read, live).add_done_callback(partial(self._was_read, live))

    def _read(self, live: _ActiveJob) -> None:
        if live.job.cancelled():
            raise Cancelled("given up before it was read")
        # An earlier process may have served other models.
        self._runtime.served(live.order.model)
        with storage(), live.stages.measure("read"):
            live.folder = self._runtime.make_folder()
            with self._source(live) as source:
                live.pixels = read_pixels(self._runtime, live.query, source, live.folder, live.owner)

    @contextmanager
    def _source(self, live: _ActiveJob) -> Iterator[Path]:
        """The file of a job, the one in its folder or the one that it names."""
        if live.query.input is None:
            yield self._store.input(live.id)
            return
        with self._runtime.references.open_input(live.query.input, live.owner) as source:
            yield source.path

    def _was_read(self, live: _ActiveJob, reading: Future[None]) -> None:
        error = reading.exception()
        if error is None:
            live.reservation.take(live.job)
            return
        _log_unforeseen(live, error)
        live.job.refuse(error)

    def _needs(self, live: _ActiveJob) -> Needs:
        """What the work will take, now that the pixels are there."""
        assert live.pixels is not None  # noqa: S101 - they were read
        return live.reservation.needs(live.pixels.segmented, live.query.options)

    def _segment(self, live: _ActiveJob, job: Job[Result]) -> Result:
        """The work on the device, in a worker's thread."""
        if self._runtime.draining or live.pixels is None or not self._store.begin(live.id):
            raise Cancelled("not begun")
        live.stages.add("queue", max(job.seconds_waited - live.stages.seconds["read"], 0.0))
        return live.reservation.segment(job, live.pixels.segmented, live.query.options)

    def _settle(self, number: str, future: Future[Result]) -> None:
        """The device is done with it, one way or the other; the rest happens in another thread than the device's."""
        if self._stopped.is_set():
            return
        with self._lock:
            live = self._live[number]
        error = Cancelled("given up") if future.cancelled() else future.exception()
        if error is not None:
            self._writers.submit(self._end, live, error)
        else:
            self._writers.submit(self._keep, live, future.result()).add_done_callback(partial(self._was_kept, live))

    def _was_kept(self, live: _ActiveJob, keeping: Future[None]) -> None:
        error = keeping.exception()
        _log_unforeseen(live, error)
        self._end(live, error)

    def _keep(self, live: _ActiveJob, result: Result) -> None:
        assert live.pixels is not None  # noqa: S101 - they were segmented
        spec = self._runtime.served(live.order.model)
        live.stages.update(result.seconds)
        own = self._store.input(live.id)
        with storage():
            received = ReceivedRequest(live.query, own, own.parent, live.owner, live.job.cancelled)
            answer = write_answer(self._runtime, received, live.pixels.measured, result, spec.identifier)
            live.stages.update(answer.seconds)
            outcome = outcome_of(spec.identifier, live.order.name, answer, result, live.stages.seconds)
            try:
                finished = self._store.finish(live.id, answer.path, outcome)
            finally:
                settle(self._runtime, received)
            if not finished:
                return
        count, seconds = result.segmentation.count, live.stages.seconds
        self._runtime.metrics.count_segmentation(spec.name, live.pixels.segmented.voxels, count, seconds)

    def _end(self, live: _ActiveJob, error: BaseException | None) -> None:
        """Note how it ended. What the service gives up, and not its owner, waits on disk for the next process."""
        try:
            if isinstance(error, Cancelled):
                self._store.put_back(live.id)
            elif isinstance(error, DeviceLost):
                log.error("job %s runs again once the service was started anew", live.id)
            elif error is not None:
                self._fail(live, error)
        finally:
            if live.folder is not None:
                shutil.rmtree(live.folder, ignore_errors=True)
            self._store.tidy(live.id)
            with self._lock:
                del self._live[live.id]
            live.over.set()

    def _fail(self, live: _ActiveJob, error: BaseException) -> None:
        try:
            self._store.fail(live.id, error)
        except OutOfStorage:
            # What was written by halves makes room for the note.
            self._store.tidy(live.id)
            self._store.fail(live.id, error)

    def _expire(self) -> None:
        while not self._stopped.wait(EXPIRY_SECONDS):
            try:
                self._store.expire()
            except (OutOfStorage, OSError, sqlite3.Error):
                # Worse than old results would be that nothing is deleted any more.
                log.exception("old jobs could not be deleted; they are tried again")


def _await(lives: list[_ActiveJob], seconds: float) -> None:
    """Wait until all of them are over, or so many seconds in all."""
    deadline = time.monotonic() + seconds
    for live in lives:
        live.over.wait(max(deadline - time.monotonic(), 0.0))


def _log_unforeseen(live: _ActiveJob, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, StackSegError):
        log.error("unexpected failure of job %s", live.id, exc_info=error)
