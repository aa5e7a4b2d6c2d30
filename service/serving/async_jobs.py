"""Jobs that are answered later: accepted, run through a device's queue, kept, run again after a crash, deleted."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from service.core.config import Settings
from service.core.errors import Cancelled, DeviceLost, NotFinished, OutOfStorage, ResultGone, StackSegError
from service.core.timing import Stages
from service.core.volume import Description
from service.inference.result import Result
from service.serving.device_worker import Reservation
from service.serving.job import Job, Needs, Progress
from service.serving.job_record import AnswerMetadata, JobRecord, JobRequest
from service.serving.job_store import INPUT, JobStore
from service.serving.parameters import Query
from service.serving.results import Pixels, ReceivedRequest, describe_answer, read_pixels, settle, write_answer
from service.serving.runtime import JOIN_SECONDS, Runtime
from service.serving.scratch import disk_full_as_out_of_storage

WRITE_THREADS = 2
CLEAN_UP_SECONDS = 60.0

log = logging.getLogger(__name__)


class JobView(NamedTuple):
    """A job as its owner sees it: the record on disk, and how far this process has come with it.

    position      1 for the job whose turn is next; None for a job that does not wait
    seconds_left  until the result is there; None if unknown
    seconds       by stage, as far as the job has come
    loading       whether the job waits for its model to be loaded
    """

    record: JobRecord
    progress: Progress
    position: int | None = None
    seconds_left: float | None = None
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    loading: bool = False


class _ActiveJob:
    """A job of this process that is not over. `folder` has its decoded pixels."""

    def __init__(self, number: str, request: JobRequest, owner: str | None, reservation: Reservation) -> None:
        self.id, self.request, self.owner, self.reservation = number, request, owner, reservation
        self.query = Query.model_validate(request.parameters)
        self.stages = Stages()
        self.stages.add("receive", request.receive_seconds)
        self.folder: Path | None = None
        self.pixels: Pixels | None = None
        self.over = threading.Event()
        self.job: Job[Result]


class AsyncJobs:
    """The jobs folder and the threads that write results. All methods but `start` wait for a disk at most.

    `keep_seconds`: how long a job is kept once it is over. Raises ConfigError for a jobs folder that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.keep_seconds = settings, settings.jobs.keep_hours * 3600
        self._store: JobStore
        if settings.jobs.folder is not None:
            self._store = self._open_store(settings.jobs.folder)
        self._active: dict[str, _ActiveJob] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._runtime: Runtime
        self._write_threads: ThreadPoolExecutor
        self._cleaner = threading.Thread(target=self._delete_old, name="expire", daemon=True)

    def start(self, runtime: Runtime) -> None:
        """Run the jobs that an earlier process left behind. The runtime starts before this, and stops after it."""
        self._runtime = runtime
        self._write_threads = ThreadPoolExecutor(WRITE_THREADS, "write")
        if self._settings.jobs.folder is None:
            self._store = self._open_store(runtime.scratch.path / "jobs")
        for record in self._store.recover():
            log.info("job %s of an earlier process runs again", record.id)
            active = self._activate(record.id, record.request, record.owner)
            active.reservation.device_worker.queue.put(active.job)
            self._read_ahead(active)
        self._cleaner.start()

    def stop(self) -> None:
        """Leave waiting jobs on disk, let running ones finish within the time to drain, close the store."""
        with self._lock:
            jobs = list(self._active.values())
        for active in jobs:
            if active.job.state == "waiting":
                active.job.cancel()
        if self._runtime.draining:
            _wait_until_over(jobs, self._settings.server.drain_seconds)
        for active in jobs:
            active.job.cancel()
        _wait_until_over(jobs, JOIN_SECONDS)
        self._stopped.set()
        self._write_threads.shutdown()
        if self._cleaner.ident is not None:
            self._cleaner.join()
        self._store.close()

    def make_incoming(self) -> Path:
        """Make a folder for a file that arrives, for `submit`. A full disk raises OutOfStorage."""
        return self._store.make_incoming()

    def submit(self, received: ReceivedRequest, name: str, description: Description, receive_seconds: float) -> JobView:
        """Accept a request in a folder of `make_incoming`; when this returns, the job outlives the process.

        The folder has the file that arrived, as INPUT, or an empty one if the query names a file of the host. Either
        was found to be as described, and is read when the job's turn comes. Raises what `Runtime.estimate` raises,
        QueueFull, NotReady and OutOfStorage.
        """
        query, owner, runtime = received.query, received.caller, self._runtime
        spec = runtime.models.spec(query.model)
        windows = runtime.estimate(spec, description, query.options).windows
        parameters = query.model_dump(mode="json", exclude_unset=True)
        request = JobRequest(spec.name, parameters, name, windows, receive_seconds)
        active = self._activate(received.folder.name, request, owner)
        try:
            active.reservation.device_worker.queue.offer(active.job)
            with disk_full_as_out_of_storage():
                self._store.accept(received.folder / INPUT, owner, request)
        except BaseException:
            active.job.cancel()
            raise
        self._read_ahead(active)
        return self.view(active.id, owner)

    def view(self, job: str, owner: str | None) -> JobView:
        """Return a job of this owner. Raises UnknownJob."""
        return self._view(self._store.find(job, owner))

    def newest(self, owner: str | None, limit: int) -> list[JobView]:
        """Return the newest jobs of this owner, newest first."""
        return [self._view(record) for record in self._store.newest(owner, limit)]

    def cancel(self, job: str, owner: str | None) -> None:
        """Cancel a job that waits or runs; delete one that is over, with its result. Raises UnknownJob."""
        self._store.find(job, owner)
        if not self._store.cancel(job):
            self._store.delete(job)
            return
        with self._lock:
            active = self._active.get(job)
        if active is not None:
            active.job.cancel()

    def result(self, job: str, owner: str | None) -> tuple[BinaryIO, AnswerMetadata]:
        """Open the result, which stays readable whatever happens to the job, and return its metadata.

        Raises UnknownJob, NotFinished, ResultGone, and the error of a job that failed.
        """
        record = self._store.find(job, owner)
        if record.failure is not None:
            raise record.failure
        if record.state == "cancelled":
            raise ResultGone("The job was cancelled; post the stack again.")
        if record.answer is None:
            raise NotFinished(f"The job is {record.state}; its result can be had once GET /jobs/{job} says done.")
        try:
            return self._store.result_path(job).open("rb"), record.answer
        except FileNotFoundError:
            raise ResultGone("The result was deleted to make room for newer ones; post the stack again.") from None

    def _open_store(self, folder: Path) -> JobStore:
        jobs, access = self._settings.jobs, self._settings.access
        return JobStore(
            folder,
            quota_bytes=jobs.quota_bytes,
            keep_seconds=self.keep_seconds,
            attempts=jobs.attempts,
            shared=len(access.keys) > 1,
        )

    def _view(self, record: JobRecord) -> JobView:
        with self._lock:
            active = self._active.get(record.id)
        if record.over or active is None:
            done = record.request.windows if record.state == "done" else 0
            seconds = record.answer.seconds if record.answer else {}
            return JobView(record, Progress(done, record.request.windows), seconds=seconds)
        reservation, job = active.reservation, active.job
        queue = reservation.device_worker.queue
        progress = job.progress if job.progress.total else Progress(0, record.request.windows)
        seconds = dict(active.stages.seconds)
        return JobView(record, progress, queue.position(job), queue.seconds_left(job), seconds, reservation.loading)

    def _activate(self, number: str, request: JobRequest, owner: str | None) -> _ActiveJob:
        active = _ActiveJob(number, request, owner, self._runtime.reserve(request.model, owner))
        work, needs = partial(self._segment, active), partial(self._needs, active)
        active.job = Job(request.model, work, windows=request.windows, needs=needs, ready=False, owner=owner)
        with self._lock:
            self._active[active.id] = active
        # The callback has only the id: the job would otherwise hold itself, and its result with it.
        active.job.future.add_done_callback(partial(self._after_device, active.id))
        return active

    def _read_ahead(self, active: _ActiveJob, *, large: bool = False) -> None:
        """Decode the file while other jobs are computed; the job may begin after that."""
        threads = self._runtime.decode_threads if large else self._runtime.read_threads
        reading = threads.submit(active.owner or "", partial(self._read, active, large=large))
        reading.add_done_callback(partial(self._after_reading, active))

    def _read(self, active: _ActiveJob, *, large: bool) -> None:
        """Read the file; one that takes long to decode is left alone unless it is its turn as a `large` one."""
        if active.job.cancelled():
            raise Cancelled("given up before it was read")
        # An earlier process may have served other models.
        self._runtime.models.servable_spec(active.request.model)
        with disk_full_as_out_of_storage(), active.stages.measure("read"):
            active.folder = active.folder or self._runtime.scratch.make_request_folder()
            source, place = self._store.input_path(active.id), active.query.input
            with ExitStack() as stack:
                if place is not None:
                    source = stack.enter_context(self._runtime.host_files.open_input(place, active.owner)).path
                pixels = read_pixels(
                    self._runtime.reader, active.query, source, active.folder, active.job.cancelled, large=large
                )
                if isinstance(pixels, Pixels):
                    active.pixels = pixels

    def _after_reading(self, active: _ActiveJob, reading: Future[None]) -> None:
        error = Cancelled("not begun") if reading.cancelled() else reading.exception()
        if error is None and active.pixels is None:
            self._read_ahead(active, large=True)
            return
        if error is None:
            active.reservation.take(active.job)
            return
        _log_unexpected(active, error)
        active.job.refuse(error)

    def _needs(self, active: _ActiveJob) -> Needs:
        assert active.pixels is not None  # noqa: S101 - they were read
        return active.reservation.needs(active.pixels.segmented, active.query.options)

    def _segment(self, active: _ActiveJob, job: Job[Result]) -> Result:
        """Segment, in a thread of the queue."""
        if self._runtime.draining or active.pixels is None or not self._store.begin(active.id):
            raise Cancelled("not begun")
        active.stages.add("queue", max(job.seconds_waited - active.stages.seconds["read"], 0.0))
        return active.reservation.segment(job, active.pixels.segmented, active.query.options)

    def _after_device(self, number: str, future: Future[Result]) -> None:
        """Leave the rest to a thread that writes, so that the device's thread goes on."""
        if self._stopped.is_set():
            return
        with self._lock:
            active = self._active[number]
        error = Cancelled("given up") if future.cancelled() else future.exception()
        if error is not None:
            self._write_threads.submit(self._end, active, error)
        else:
            writing = self._write_threads.submit(self._write, active, future.result())
            writing.add_done_callback(partial(self._after_writing, active))

    def _after_writing(self, active: _ActiveJob, writing: Future[None]) -> None:
        error = writing.exception()
        _log_unexpected(active, error)
        self._end(active, error)

    def _write(self, active: _ActiveJob, result: Result) -> None:
        assert active.pixels is not None  # noqa: S101 - they were segmented
        store, host_files = self._store, self._runtime.host_files
        spec = self._runtime.models.servable_spec(active.request.model)
        active.stages.update(result.seconds)
        source = store.input_path(active.id)
        received = ReceivedRequest(active.query, source, source.parent, active.owner, active.job.cancelled)
        with disk_full_as_out_of_storage():
            answer = write_answer(host_files, received, active.pixels.measured, result, spec.identifier)
            active.stages.update(answer.seconds)
            metadata = describe_answer(spec.identifier, active.request.name, answer, result, active.stages.seconds)
            try:
                finished = store.finish(active.id, answer.path, metadata)
            finally:
                settle(host_files, received)
            if not finished:
                return
        count, seconds = result.segmentation.count, active.stages.seconds
        self._runtime.metrics.count_segmentation(spec.name, active.pixels.segmented.voxels, count, seconds)

    def _end(self, active: _ActiveJob, error: BaseException | None) -> None:
        """Record how the job ended. A job that the service cancels, and not its owner, waits for the next process."""
        try:
            if isinstance(error, Cancelled):
                self._store.requeue(active.id)
            elif isinstance(error, DeviceLost):
                log.error("job %s runs again once the service was started anew", active.id)
            elif error is not None:
                self._fail(active, error)
        finally:
            if active.folder is not None:
                shutil.rmtree(active.folder, ignore_errors=True)
            self._store.delete_unneeded_files(active.id)
            with self._lock:
                del self._active[active.id]
            active.over.set()

    def _fail(self, active: _ActiveJob, error: BaseException) -> None:
        try:
            self._store.fail(active.id, error)
        except OutOfStorage:
            # A half-written result makes room for the record.
            self._store.delete_unneeded_files(active.id)
            self._store.fail(active.id, error)

    def _delete_old(self) -> None:
        while not self._stopped.wait(CLEAN_UP_SECONDS):
            try:
                self._store.delete_old()
            except (OutOfStorage, OSError, sqlite3.Error):
                # The thread goes on: without it nothing would ever be deleted again.
                log.exception("old jobs could not be deleted; they are tried again")


def _wait_until_over(jobs: list[_ActiveJob], seconds: float) -> None:
    """Wait until all of the jobs are over, for so many seconds in all."""
    deadline = time.monotonic() + seconds
    for active in jobs:
        active.over.wait(max(deadline - time.monotonic(), 0.0))


def _log_unexpected(active: _ActiveJob, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, StackSegError):
        log.error("unexpected failure of job %s", active.id, exc_info=error)
