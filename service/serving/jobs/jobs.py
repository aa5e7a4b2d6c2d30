"""Jobs that are answered later: accepted, run through a device's queue, kept, run again after a crash, deleted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    Cancelled,
    DeviceLost,
    InternalError,
    NotFinished,
    OutOfStorage,
    RateLimited,
    ResultGone,
    StackSegError,
    StorageUnavailable,
)
from service.core.types import Description
from service.formats.sandbox.parent import Source
from service.inference.series.time_points import Series
from service.inference.types import Result
from service.serving.devices.job import Job, Needs
from service.serving.devices.queue import JobQueue, JobThreads
from service.serving.fair_threads import begin_threads
from service.serving.jobs.active_job import ActiveJob, JobView, view_job, wait_until_over
from service.serving.jobs.folder_run import FolderPlaces, FolderRun
from service.serving.jobs.folder_work import Done
from service.serving.jobs.record import JobRecord, JobRequest, as_failure
from service.serving.jobs.store import INPUT, JobStore
from service.serving.results.answers import (
    RECEIPT,
    LargePixels,
    Pixels,
    ReceivedRequest,
    describe_answer,
    read_pixels,
    settle,
    write_answer,
)
from service.serving.results.metadata import AnswerMetadata
from service.serving.results.provenance import hash_file
from service.serving.runtime import JOIN_SECONDS, Runtime
from service.serving.storage.disk_usage import measure_disk
from service.serving.storage.scratch import translate_disk_faults
from service.serving.storage.stack_store import StackStore

WRITE_THREADS = 2
# Jobs on folders that run at a time: each has one stack at a device.
FOLDERS_AT_ONCE = 4
CLEAN_UP_SECONDS = 60.0
# How often folders are looked after and what a fault of the storage stopped is tried again, and for how long.
TICK_SECONDS = 1.0
FAULT_SECONDS = 60.0

log = logging.getLogger(__name__)


class AsyncJobs:
    """The jobs folder and the threads that write results. All methods but `start` wait for a disk at most.

    A step that the storage fails is tried again for `fault_seconds`; then the job has failed with the reason, which is
    kept in memory for as long as it cannot be written. `keep_seconds`: how long a job is kept once it is over. Methods
    raise OutOfStorage and StorageUnavailable as `JobStore` does. Raises ConfigError for a jobs folder that cannot be
    used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.keep_seconds = settings, settings.jobs.keep_hours * 3600
        self.fault_seconds = FAULT_SECONDS
        self._store: JobStore
        self.stacks: StackStore
        if settings.jobs.folder is not None:
            self._store = self._open_store(settings.jobs.folder)
        self._active: dict[str, ActiveJob] = {}
        # Failures that the database has not taken yet, and when they happened, by the job's id.
        self._unrecorded: dict[str, tuple[StackSegError, float]] = {}
        self._again: deque[Callable[[], None]] = deque()
        self._problem: str | None = None
        self._cleaned = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._runtime: Runtime
        self._write_threads: ThreadPoolExecutor
        # Jobs on folders queue their stacks one by one at devices.
        self._folders = JobQueue(settings.limits.waiting, FOLDERS_AT_ONCE, shared=len(settings.access.keys) > 1)
        self._folder_threads = JobThreads("folder", self._folders.take, FOLDERS_AT_ONCE)
        self._keeper = threading.Thread(target=self._keep_storage, name="storage", daemon=True)

    def start(self, runtime: Runtime) -> None:
        """Run the jobs that an earlier process left behind. The runtime starts before this, and stops after it."""
        self._runtime = runtime
        self._write_threads = begin_threads(WRITE_THREADS, "write")
        if self._settings.jobs.folder is None:
            self._store = self._open_store(runtime.scratch.path / "jobs")
        for record in self._store.recover():
            try:
                active = self._activate(record.id, record.request, record.owner)
            except Exception as error:
                # Such as one with parameters of another version; it keeps no other from running.
                log.exception("job %s of an earlier process cannot run", record.id)
                self._store.fail(record.id, error)
                continue
            log.info("job %s of an earlier process runs again", record.id)
            active.queue.put(active.job)
            self._prepare_later(active)
        self._folder_threads.start()
        runtime.checks.append(lambda: self._problem)
        runtime.unfinished.append(self._is_busy)
        folder, jobs = self._settings.jobs.folder or runtime.scratch.path, self._settings.jobs
        runtime.disk_usages |= {
            "jobs": lambda: measure_disk(folder, self._store.nbytes, jobs.quota_bytes),
            "stacks": lambda: measure_disk(folder, self.stacks.nbytes, jobs.stacks_bytes),
        }
        self._keeper.start()

    def stop(self) -> None:
        """Leave waiting jobs on disk, let running ones finish within the time to drain, close the store."""
        with self._lock:
            jobs = list(self._active.values())
        for active in jobs:
            if active.job.state == "waiting":
                active.job.cancel()
        if self._runtime.draining:
            wait_until_over(jobs, self._settings.server.drain_seconds)
        for active in jobs:
            active.job.cancel()
        wait_until_over(jobs, JOIN_SECONDS)
        self._folders.close()
        self._folder_threads.join(JOIN_SECONDS)
        self._stopped.set()
        # It hands work to the threads that write.
        if self._keeper.ident is not None:
            self._keeper.join()
        self._write_threads.shutdown()
        self._record_failures()
        self._store.close()

    def _is_busy(self) -> bool:
        """Whether a job runs or is being written."""
        with self._lock:
            return any(active.job.state != "waiting" for active in self._active.values())

    def make_incoming(self) -> Path:
        """Make a folder for a file that arrives, for `submit`. A full disk raises OutOfStorage."""
        return self._store.make_incoming()

    def submit(self, received: ReceivedRequest, name: str, description: Description, receive_seconds: float) -> JobView:
        """Accept a request in a folder of `make_incoming`; when this returns, the job outlives the process.

        The folder has the file that arrived, as INPUT, or an empty one if the query names a file of the host. Either
        was found to be as described, and is read when the job's turn comes. Raises BadParameter where no volume can be
        read of it, what `Runtime.estimate` raises, QueueFull and NotReady.
        """
        if description.problem:
            raise BadParameter(description.problem)
        query, runtime = received.query, self._runtime
        spec = runtime.models.spec(query.model)
        windows = description.volumes * runtime.estimate(spec, description, query.options).windows
        parameters = query.model_dump(mode="json", exclude_unset=True)
        return self._accept(received, JobRequest(spec.name, parameters, name, windows, receive_seconds))

    def submit_folder(self, received: ReceivedRequest, name: str, receive_seconds: float) -> JobView:
        """Accept a request whose query names a folder of stacks, as `submit` does; its results outlive the job.

        Raises BadParameter where the folders cannot be used, what `Estimator.plan` raises, QueueFull and NotReady.
        """
        query, runtime = received.query, self._runtime
        spec = runtime.models.spec(query.model)
        runtime.device_workers[0].estimator(spec).plan(query.options)
        places = FolderPlaces.of(query, received.caller)
        places.check(runtime.host_files, overwrite=bool(query.overwrite))
        place = f"{places.stacks.removesuffix('/')}/"
        parameters = query.model_dump(mode="json", exclude_unset=True) | {"input": place}
        return self._accept(received, JobRequest(spec.name, parameters, name, 0, receive_seconds))

    def _accept(self, received: ReceivedRequest, request: JobRequest) -> JobView:
        active = self._activate(received.folder.name, request, received.caller)
        try:
            # A model is deleted where no job is for it, which this one is since it was activated.
            self._runtime.models.servable_spec(request.model)
            active.queue.offer(active.job)
            self._store.accept(received.folder / INPUT, received.caller, request)
        except BaseException:
            active.job.cancel()
            raise
        self._prepare_later(active)
        return self.view(active.id, received.caller)

    def view(self, job: str, owner: str | None) -> JobView:
        """Return a job of this owner. Raises UnknownJob."""
        return self._view(self._find(job, owner))

    def newest(self, owner: str | None, limit: int) -> list[JobView]:
        """Return the newest jobs of this owner, newest first."""
        return [self._view(self._with_failure(record)) for record in self._store.newest(owner, limit)]

    def uses(self, model: str) -> bool:
        """Return whether a job that waits or runs is for this model."""
        with self._lock:
            return any(active.request.model == model for active in self._active.values())

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

        Raises UnknownJob, NotFinished, ResultGone, and the error of a job that failed and has no result.
        """
        record = self._find(job, owner)
        if record.failure is not None and record.answer is None:
            raise record.failure
        if record.state == "cancelled":
            raise ResultGone("The job was cancelled; post the stack again.")
        if record.answer is None:
            raise NotFinished(f"The job is {record.state}; its result can be had once GET /jobs/{job} says done.")
        try:
            return self._store.result_path(job).open("rb"), record.answer
        except FileNotFoundError:
            raise ResultGone("The result was deleted, to make room or by the operator; post the stack again.") from None

    def _find(self, job: str, owner: str | None) -> JobRecord:
        return self._with_failure(self._store.find(job, owner))

    def _with_failure(self, record: JobRecord) -> JobRecord:
        """Return the record as it would be if the database had taken the job's failure."""
        failed = self._unrecorded.get(record.id)
        if failed is None or record.over:
            return record
        failure, ended = failed
        return replace(record, state="failed", failure=failure, ended=ended)

    def _open_store(self, folder: Path) -> JobStore:
        jobs, access = self._settings.jobs, self._settings.access
        self.stacks = StackStore(folder / "stacks", quota_bytes=jobs.stacks_bytes, keep_seconds=self.keep_seconds)
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
        return view_job(record, active)

    def _activate(self, number: str, request: JobRequest, owner: str | None) -> ActiveJob:
        active = ActiveJob(number, request, owner, self._runtime.reserve(request.model, owner))
        work = partial(self._segment_folder if request.is_folder else self._segment, active)
        needs = Needs if request.is_folder else partial(self._needs, active)
        if request.is_folder:
            active.queue = self._folders
        active.space = self._runtime.scratch_space.hold(owner or "")
        active.job = Job(request.model, work, windows=request.windows, needs=needs, ready=False, owner=owner)
        with self._lock:
            self._active[active.id] = active
        # The callback has only the id: the job would otherwise hold itself, and its result with it.
        active.job.future.add_done_callback(partial(self._after_device, active.id))
        return active

    def _prepare_later(self, active: ActiveJob) -> None:
        """Have done what is done before a job may begin. The stacks of a folder are read in their turn."""
        if active.request.is_folder:
            active.queue.release(active.job)
        else:
            self._read_ahead(active)

    def _read_ahead(self, active: ActiveJob, *, large: bool = False) -> None:
        """Decode the file while other jobs are computed; the job may begin after that."""
        threads = self._runtime.decode_threads if large else self._runtime.read_threads
        threads.submit(active.owner or "", partial(self._prepare, active, large=large))

    def _prepare(self, active: ActiveJob, *, large: bool) -> None:
        """Read the file and ask for the model, in a thread that reads. A job for which that fails has failed."""
        try:
            pixels = self._read(active, large=large)
            if isinstance(pixels, LargePixels):
                self._decode_later(active, pixels.nbytes)
                return
            active.pixels = pixels
            active.faulted = None
            active.reservation.take(active.job)
        except Exception as error:  # noqa: BLE001 - the job gets it
            if not self._try_again(active, error, partial(self._read_ahead, active)):
                active.log_unexpected(error)
                active.job.refuse(error)
        finally:
            # A job that was cancelled meanwhile has deleted the folder before this has made it.
            if active.job.future.done():
                active.delete_pixels()

    def _decode_later(self, active: ActiveJob, nbytes: int) -> None:
        """Have a large file decoded once there is space for so many bytes: a job that was accepted waits for that."""
        active.space.add(-active.space.nbytes)
        try:
            if not active.job.cancelled():
                active.space.reserve(nbytes)
        except (OutOfStorage, RateLimited) as error:
            if not active.waits_for_space:
                active.waits_for_space = True
                log.warning("job %s waits for %d MiB to be decoded into: %s", active.id, nbytes // 2**20, error)
            self._again.append(partial(self._decode_later, active, nbytes))
            return
        self._read_ahead(active, large=True)

    def _read(self, active: ActiveJob, *, large: bool) -> Pixels | LargePixels:
        """Read the file; one that takes long to decode is only described unless it is its turn as a `large` one."""
        if active.job.cancelled():
            raise Cancelled("given up before it was read")
        # An earlier process may have served other models.
        self._runtime.models.servable_spec(active.request.model)
        kept, place = self._store.input_path(active.id), active.query.input
        source: Source = kept
        if not kept.exists():
            raise InternalError("The input of the job is lost; post it again.")
        active.delete_pixels()
        with translate_disk_faults(), active.stages.measure("read"):
            active.folder = self._runtime.scratch.make_request_folder()
            with ExitStack() as stack:
                if place is not None:
                    source = stack.enter_context(self._runtime.host_files.open_input(place, active.owner)).path
                pixels = read_pixels(
                    self._runtime.reader, active.query, source, active.folder, active.job.cancelled, large=large
                )
                if isinstance(pixels, Pixels) and isinstance(pixels.segmented, Series):
                    active.files = stack.pop_all()
                return pixels

    def _try_again(self, active: ActiveJob, error: Exception, step: Callable[[], None]) -> bool:
        """Have a step done again soon if the storage has failed it; return False if it has done so for too long."""
        if not isinstance(error, OutOfStorage | StorageUnavailable) or active.job.cancelled() or self._stopped.is_set():
            return False
        now = time.monotonic()
        if active.faulted is None:
            active.faulted = now
            log.warning("job %s: %s Tried again for %g s", active.id, error, self.fault_seconds)
        if now - active.faulted > self.fault_seconds:
            log.error("job %s has failed: %s", active.id, error)
            return False
        self._again.append(step)
        return True

    def _needs(self, active: ActiveJob) -> Needs:
        assert active.pixels is not None  # noqa: S101 - they were read
        return active.reservation.needs(active.pixels.segmented, active.query.options)

    def _segment_folder(self, active: ActiveJob, job: Job[Result | Done]) -> Done:
        """Segment the stacks of a folder, in a thread of those for folders."""
        if self._runtime.draining or not self._begin(active):
            raise Cancelled("not begun")
        active.stages.add("queue", job.seconds_waited)
        credit = partial(self._store.credit, active.id)
        active.run = FolderRun(self._runtime, active.query, active.request.model, job, active.space, credit)
        with active.stages.measure("stacks"):
            return active.run.run()

    def _segment(self, active: ActiveJob, job: Job[Result | Done]) -> Result:
        """Segment, in a thread of the queue."""
        if self._runtime.draining or active.pixels is None or not self._begin(active):
            raise Cancelled("not begun")
        active.stages.add("queue", max(job.seconds_waited - active.stages.seconds["read"], 0.0))
        return active.reservation.segment(job, active.pixels.segmented, active.query.options)

    def _begin(self, active: ActiveJob) -> bool:
        """Record that the job runs; return False if it must not. A fault of the storage keeps no job from running."""
        try:
            return self._store.begin(active.id)
        except (OutOfStorage, StorageUnavailable) as error:
            log.warning("job %s begins, which cannot be recorded: %s", active.id, error)
            return not active.job.cancelled()

    def _after_device(self, number: str, future: Future[Result | Done]) -> None:
        """Leave the rest to a thread that writes, so that the device's thread goes on."""
        if self._stopped.is_set():
            return
        with self._lock:
            active = self._active[number]
        self._write_later(active, future)

    def _write_later(self, active: ActiveJob, future: Future[Result | Done]) -> None:
        self._write_threads.submit(self._conclude, active, future)

    def _conclude(self, active: ActiveJob, future: Future[Result | Done]) -> None:
        """Write the result of a job, or why there is none, in a thread that writes."""
        error = Cancelled("given up") if future.cancelled() else future.exception()
        if error is None:
            try:
                self._write(active, future.result())
            except Exception as failure:  # noqa: BLE001 - the job gets it
                if self._try_again(active, failure, partial(self._write_later, active, future)):
                    return
                active.log_unexpected(failure)
                # The next process may find room for the result of a job that this one gives up.
                stopped = active.job.cancelled() and isinstance(failure, OutOfStorage | StorageUnavailable)
                error = Cancelled("given up before its result was written") if stopped else failure
                with suppress(StackSegError, OSError):
                    settle(self._runtime.host_files, self._received(active))
        self._end(active, error)

    def _write(self, active: ActiveJob, result: Result | Done) -> None:
        if isinstance(result, Done):
            self._write_receipt(active, result)
            return
        assert active.pixels is not None  # noqa: S101 - they were segmented
        store, host_files = self._store, self._runtime.host_files
        active.stages.update(result.seconds)
        received = self._received(active)
        with translate_disk_faults():
            # That of a file of the host is an empty one.
            if active.query.input is None and received.source.is_file():
                received = received._replace(digest=hash_file(received.source))
            answer = write_answer(host_files, received, active.pixels.measured, result)
            active.stages.update(answer.seconds)
            metadata = describe_answer(active.request.name, answer, result, active.stages.seconds)
            fault = result.series.fault if result.series else None
            finished = store.finish(active.id, answer.path, metadata, fault)
            settle(host_files, received)
            if not finished:
                return
        count, seconds = result.segmentation.count, active.stages.seconds
        self._runtime.metrics.count_segmentation(active.request.model, active.pixels.segmented.voxels, count, seconds)

    def _write_receipt(self, active: ActiveJob, done: Done) -> None:
        assert active.run is not None  # noqa: S101 - it has made the results
        metadata, content = active.run.describe(done, active.request.name, dict(active.stages.seconds))
        receipt = self._store.input_path(active.id).parent / RECEIPT
        with translate_disk_faults():
            receipt.write_text(content, encoding="utf-8")
            self._store.finish(active.id, receipt, metadata)

    def _received(self, active: ActiveJob) -> ReceivedRequest:
        source = self._store.input_path(active.id)
        name, cancelled = active.request.name, active.job.cancelled
        return ReceivedRequest(active.query, source, source.parent, active.owner, cancelled, name)

    def _end(self, active: ActiveJob, error: BaseException | None) -> None:
        """Record how the job ended. A job that the service cancels, and not its owner, waits for the next process."""
        try:
            active.delete_pixels()
            if isinstance(error, Cancelled):
                self._store.requeue(active.id)
            elif isinstance(error, DeviceLost):
                log.error("job %s runs again once the service was started anew", active.id)
            elif error is not None:
                self._unrecorded[active.id] = as_failure(error), time.time()
                self._record_failures()
                if active.id in self._unrecorded:
                    log.error("the failure of job %s is recorded once that is possible: %s", active.id, error)
            self._store.delete_unneeded_files(active.id)
        except (OutOfStorage, StorageUnavailable) as fault:
            log.warning("job %s is over; its files are deleted later: %s", active.id, fault)
        except Exception:
            log.exception("unexpected failure at the end of job %s", active.id)
        finally:
            with self._lock:
                del self._active[active.id]
            active.space.close()
            active.over.set()

    def _record_failures(self) -> None:
        """Record how jobs have failed, as far as the database takes it. The next tick tries the rest again."""
        for job, (failure, _) in list(self._unrecorded.items()):
            with suppress(OutOfStorage, StorageUnavailable, OSError):
                # A half-written result makes room for the record.
                self._store.delete_unneeded_files(job)
                self._store.fail(job, failure)
                self._unrecorded.pop(job, None)
                self._store.delete_unneeded_files(job)

    def _keep_storage(self) -> None:
        """Look after the folders, try again what a fault has stopped, delete what is old."""
        while not self._stopped.wait(TICK_SECONDS):
            again = [self._again.popleft() for _ in range(len(self._again))]
            for step in (self._mend, *again, self._record_failures, self._clean_up):
                try:
                    step()
                except Exception:
                    # The others go on: without them nothing would ever be deleted or tried again.
                    log.exception("folders and jobs cannot be looked after; this is tried again")

    def _mend(self) -> None:
        """Make folders again that somebody has deleted; the service is not ready until they are found whole."""
        problems = [problem for problem in (self._runtime.scratch.mend(), self._store.mend()) if problem]
        problem = " ".join(problems) or None
        if problem != self._problem:
            log.error("%s", problem or "The folders of the service can be used again.")
        self._problem = problem

    def _clean_up(self) -> None:
        """Delete what is old, now and then."""
        if time.monotonic() - self._cleaned > CLEAN_UP_SECONDS:
            self._cleaned = time.monotonic()
            self._store.clean_up()
            self.stacks.clean_up()
