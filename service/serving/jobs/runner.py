"""The steps of an accepted job: read, run on a device, write, end; again whenever the storage has failed one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from service.core.errors import (
    Cancelled,
    DeviceLost,
    InternalError,
    OutOfStorage,
    RateLimited,
    StackSegError,
    StorageUnavailable,
)
from service.inference.types import Series
from service.serving.devices.queue.job import Job, Needs
from service.serving.jobs.active_job import ActiveJob
from service.serving.jobs.failure import as_failure
from service.serving.jobs.folder_run import FolderRun
from service.serving.jobs.folder_work import Done
from service.serving.parameters import SegmentationRequest
from service.serving.reading import LargePixels, Pixels, PixelSource
from service.serving.results.answers import RECEIPT, describe_answer, settle, write_answer
from service.serving.results.provenance import hash_file
from service.serving.storage.disk import translate_disk_faults

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Source
    from service.inference.types import Result
    from service.serving.devices.queue.job_queue import JobQueue
    from service.serving.jobs.record import JobRequest
    from service.serving.jobs.store import JobStore
    from service.serving.runtime import Runtime

# How long a step that the storage fails is tried again.
FAULT_SECONDS = 60.0

log = logging.getLogger(__name__)

P = TypeVar("P", Pixels, Pixels | LargePixels)


class JobRunner:
    """Takes jobs through their steps. `folders` is the queue of jobs on folders.

    A step that the storage fails is tried again for `fault_seconds`; then the job has failed with the reason, which is
    kept in memory for as long as it cannot be written.
    """

    def __init__(self, runtime: Runtime, store: JobStore, folders: JobQueue, writers: ThreadPoolExecutor) -> None:
        self._runtime, self._store, self._folders, self._writers = runtime, store, folders, writers
        self.fault_seconds = FAULT_SECONDS
        # Failures that the database has not taken yet, and when they happened, by the job's id.
        self.unrecorded: dict[str, tuple[StackSegError, float]] = {}
        self._again: deque[Callable[[], None]] = deque()
        self._active: dict[str, ActiveJob] = {}
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def jobs(self) -> list[ActiveJob]:
        """The jobs of this process that are not over."""
        with self._lock:
            return list(self._active.values())

    def find(self, number: str) -> ActiveJob | None:
        """Return a job by its id, None for one that is over or of another process."""
        with self._lock:
            return self._active.get(number)

    def stop(self) -> None:
        """Write nothing more but failures. The threads that write have ended."""
        self._stopped = True

    def retry(self) -> None:
        """Take the steps again that the storage has failed since the last call."""
        for step in [self._again.popleft() for _ in range(len(self._again))]:
            try:
                step()
            except Exception:
                log.exception("a step of a job cannot be tried again")

    def activate(self, number: str, request: JobRequest, owner: str | None) -> ActiveJob:
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

    def prepare(self, active: ActiveJob) -> None:
        """Have done what is done before a job may begin. The stacks of a folder are read in their turn."""
        if active.request.is_folder:
            active.queue.release(active.job)
        else:
            self._read_ahead(active)

    def _read_ahead(self, active: ActiveJob) -> None:
        """Read the file while other jobs are computed; the job may begin after that."""
        self._runtime.read_threads.submit(active.owner or "", partial(self._try_reading, active, self._read_small))

    def _try_reading(self, active: ActiveJob, read: Callable[[ActiveJob], None]) -> None:
        """Read the file in a thread that reads. A job for which that fails has failed."""
        try:
            read(active)
        except Exception as error:  # noqa: BLE001 - the job gets it
            if not self._try_again(active, error, partial(self._read_ahead, active)):
                active.log_unexpected(error)
                active.job.refuse(error)
        finally:
            # A job that was cancelled meanwhile has deleted the folder before this has made it.
            if active.job.future.done():
                active.delete_pixels()

    def _read_small(self, active: ActiveJob) -> None:
        pixels = self._read(active, PixelSource.read_small_pixels)
        if isinstance(pixels, Pixels):
            self._ask_for_model(active, pixels)
        else:
            self._decode_later(active, pixels.nbytes)

    def _read_large(self, active: ActiveJob) -> None:
        self._ask_for_model(active, self._read(active, PixelSource.read_pixels))

    @staticmethod
    def _ask_for_model(active: ActiveJob, pixels: Pixels) -> None:
        """Let the job begin once its model is loaded."""
        active.pixels = pixels
        active.faulted = None
        active.reservation.take(active.job)

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
        self._runtime.decode_threads.submit(active.owner or "", partial(self._try_reading, active, self._read_large))

    def _read(self, active: ActiveJob, read: Callable[[PixelSource], P]) -> P:
        """Read the file into a folder of its own."""
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
                request = self._request(active)._replace(folder=active.folder)
                pixels = read(PixelSource.sandboxed(self._runtime.reader, request, source))
                if isinstance(pixels, Pixels) and isinstance(pixels.segmented, Series):
                    active.files = stack.pop_all()
                return pixels

    def _try_again(self, active: ActiveJob, error: Exception, step: Callable[[], None]) -> bool:
        """Have a step done again soon if the storage has failed it; return False if it has done so for too long."""
        if not isinstance(error, OutOfStorage | StorageUnavailable) or active.job.cancelled() or self._stopped:
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
        if self._stopped:
            return
        with self._lock:
            active = self._active[number]
        self._write_later(active, future)

    def _write_later(self, active: ActiveJob, future: Future[Result | Done]) -> None:
        self._writers.submit(self._conclude, active, future)

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
                    settle(self._runtime.host_files, self._request(active))
        self._end(active, error)

    def _write(self, active: ActiveJob, result: Result | Done) -> None:
        if isinstance(result, Done):
            self._write_receipt(active, result)
            return
        assert active.pixels is not None  # noqa: S101 - they were segmented
        store, host_files = self._store, self._runtime.host_files
        active.stages.update(result.seconds)
        request = self._request(active)
        with translate_disk_faults():
            # That of a file of the host is an empty one.
            if active.query.input is None and request.source.is_file():
                request = request._replace(digest=hash_file(request.source))
            answer = write_answer(host_files, request, active.pixels.measured, result)
            active.stages.update(answer.seconds)
            metadata = describe_answer(active.request.name, answer, result, active.stages.seconds)
            fault = result.series.fault if result.series else None
            finished = store.finish(active.id, answer.path, metadata, fault)
            settle(host_files, request)
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

    def _request(self, active: ActiveJob) -> SegmentationRequest:
        source = self._store.input_path(active.id)
        name, cancelled = active.request.name, active.job.cancelled
        return SegmentationRequest(active.query, source, source.parent, active.owner, cancelled, name)

    def _end(self, active: ActiveJob, error: BaseException | None) -> None:
        """Record how the job ended. A job that the service cancels, and not its owner, waits for the next process."""
        try:
            active.delete_pixels()
            if isinstance(error, Cancelled):
                self._store.requeue(active.id)
            elif isinstance(error, DeviceLost):
                log.error("job %s runs again once the service was started anew", active.id)
            elif error is not None:
                self.unrecorded[active.id] = as_failure(error), time.time()
                self.record_failures()
                if active.id in self.unrecorded:
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

    def record_failures(self) -> None:
        """Record how jobs have failed, as far as the database takes it. The next tick tries the rest again."""
        for job, (failure, _) in list(self.unrecorded.items()):
            with suppress(OutOfStorage, StorageUnavailable, OSError):
                # A half-written result makes room for the record.
                self._store.delete_unneeded_files(job)
                self._store.fail(job, failure)
                self.unrecorded.pop(job, None)
                self._store.delete_unneeded_files(job)
