"""The steps of an accepted job: read, segment, write, end. Steps are retried after storage errors."""

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
from service.serving.devices.queue.job import Job, ResourceNeeds
from service.serving.jobs.active_job import ActiveJob, UnrecordedEnds
from service.serving.jobs.failure import to_public_error
from service.serving.jobs.folders.job_run import FolderRun
from service.serving.jobs.folders.segment_folder import FolderOutcome
from service.serving.parameters import SegmentationRequest
from service.serving.reading import DeferredPixels, Pixels, PixelSource
from service.serving.results.answers import RECEIPT_FILE, confirm_delivery, describe_answer, write_answer
from service.serving.results.provenance import hash_file
from service.serving.segmentation import segment_pixels
from service.serving.storage.disk import translate_disk_errors

if TYPE_CHECKING:
    from service.formats.sandbox.reader import Source
    from service.inference.types import Result
    from service.serving.devices.queue.job_queue import JobQueue
    from service.serving.jobs.record import JobRequest
    from service.serving.jobs.store import JobStore
    from service.serving.runtime import Runtime

# Time for which a step is retried after storage errors.
STORAGE_RETRY_SECONDS = 60.0

log = logging.getLogger(__name__)

P = TypeVar("P", Pixels, Pixels | DeferredPixels)


class JobRunner:
    """Runs the steps of jobs.

    A step that fails with a storage error is retried for `retry_seconds`. After that, the job fails. The failure is
    stored in memory until it can be written to the database.

    folder_queue     queue for jobs on folders
    writers          threads that write results
    unrecorded_ends  failures and cancellations that could not be written to the database yet
    """

    def __init__(self, runtime: Runtime, store: JobStore, folder_queue: JobQueue, writers: ThreadPoolExecutor) -> None:
        self._runtime, self._store, self._folder_queue, self._writers = runtime, store, folder_queue, writers
        self.retry_seconds = STORAGE_RETRY_SECONDS
        self.unrecorded_ends = UnrecordedEnds(store)
        self._retries: deque[Callable[[], None]] = deque()
        self._active_jobs: dict[str, ActiveJob] = {}
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def active_jobs(self) -> list[ActiveJob]:
        """The unfinished jobs of this process."""
        with self._lock:
            return list(self._active_jobs.values())

    def find(self, job_id: str) -> ActiveJob | None:
        """Return an unfinished job of this process by its ID, or None."""
        with self._lock:
            return self._active_jobs.get(job_id)

    def stop(self) -> None:
        """Stop writing, except for the recording of failures. Call this before the write threads are shut down."""
        self._is_stopped = True

    def retry_failed_steps(self) -> None:
        """Retry the steps that failed with a storage error since the last call."""
        for step in [self._retries.popleft() for _ in range(len(self._retries))]:
            try:
                step()
            except Exception:
                log.exception("retrying a step of a job failed")

    def activate(self, job_id: str, request: JobRequest, owner: str | None) -> ActiveJob:
        """Create the active job of a request, without adding the job to a queue."""
        active_job = ActiveJob(job_id, request, owner, self._runtime.reserve(request.model, owner))
        work = partial(self._segment_folder if request.is_folder else self._segment, active_job)
        needs = ResourceNeeds if request.is_folder else partial(self._estimate_needs, active_job)
        if request.is_folder:
            active_job.queue = self._folder_queue
        active_job.space = self._runtime.scratch_space.make_reservation(owner or "")
        active_job.job = Job(
            request.model, work, window_count=request.window_count, needs=needs, is_ready=False, owner=owner
        )
        with self._lock:
            self._active_jobs[active_job.id] = active_job
        # Pass only the ID. A reference to the active job would create a reference cycle and keep the result in memory.
        active_job.job.future.add_done_callback(partial(self._on_work_done, active_job.id))
        return active_job

    def prepare(self, active_job: ActiveJob) -> None:
        """Start preparing a job. Jobs on folders need no preparation, because they read one stack at a time."""
        if active_job.request.is_folder:
            active_job.queue.mark_ready(active_job.job)
        else:
            self._read_ahead(active_job)

    def _read_ahead(self, active_job: ActiveJob) -> None:
        """Read the file while other jobs are running. The job can begin when its file has been read."""
        self._runtime.read_threads.submit(
            active_job.owner or "", partial(self._read_or_fail, active_job, self._read_small_input)
        )

    def _read_or_fail(self, active_job: ActiveJob, read: Callable[[ActiveJob], None]) -> None:
        """Call `read` in a read thread. Schedule a retry after a storage error; fail the job after any other error."""
        try:
            read(active_job)
        except Exception as error:  # noqa: BLE001 - reported as the failure of the job
            if not self._schedule_retry(active_job, error, partial(self._read_ahead, active_job)):
                active_job.log_unexpected_error(error)
                active_job.job.fail_before_start(error)
        finally:
            # If the job was canceled in the meantime, `delete_pixels` may have been called before the folder existed.
            if active_job.job.future.done():
                active_job.delete_pixels()

    def _read_small_input(self, active_job: ActiveJob) -> None:
        pixels = self._read_input(active_job, PixelSource.read_small_pixels)
        if isinstance(pixels, Pixels):
            self._request_model(active_job, pixels)
        else:
            self._decode_later(active_job, pixels.nbytes)

    def _read_large_input(self, active_job: ActiveJob) -> None:
        self._request_model(active_job, self._read_input(active_job, PixelSource.read_pixels))

    @staticmethod
    def _request_model(active_job: ActiveJob, pixels: Pixels) -> None:
        """Allow the job to begin as soon as the model is loaded."""
        active_job.pixels = pixels
        active_job.first_error_time = None
        active_job.reservation.request_model(active_job.job)

    def _decode_later(self, active_job: ActiveJob, nbytes: int) -> None:
        """Decode a large file as soon as `nbytes` of scratch space are available."""
        active_job.space.add(-active_job.space.nbytes)
        try:
            if not active_job.job.cancelled():
                active_job.space.reserve(nbytes)
        except (OutOfStorage, RateLimited) as error:
            if not active_job.has_logged_missing_space:
                active_job.has_logged_missing_space = True
                log.warning("job %s is waiting for %d MiB of scratch space: %s", active_job.id, nbytes // 2**20, error)
            self._retries.append(partial(self._decode_later, active_job, nbytes))
            return
        self._runtime.decode_threads.submit(
            active_job.owner or "", partial(self._read_or_fail, active_job, self._read_large_input)
        )

    def _read_input(self, active_job: ActiveJob, read_pixels: Callable[[PixelSource], P]) -> P:
        """Read the file, using a new scratch folder."""
        if active_job.job.cancelled():
            raise Cancelled("The job was canceled before its input was read.")
        # The job may be from an earlier process that served different models.
        self._runtime.models.get_servable_spec(active_job.request.model)
        upload, location = self._store.get_input_path(active_job.id), active_job.query.input
        source: Source = upload
        if not upload.exists():
            raise InternalError("The input of the job was lost. Submit the job again.")
        active_job.delete_pixels()
        with translate_disk_errors(), active_job.stages.measure("read"):
            active_job.pixel_folder = self._runtime.scratch.make_request_folder()
            with ExitStack() as stack:
                if location is not None:
                    source = stack.enter_context(self._runtime.host_files.open_input(location, active_job.owner)).path
                request = self._make_request(active_job)._replace(folder=active_job.pixel_folder)
                pixels = read_pixels(PixelSource.from_sandbox(self._runtime.reader, request, source))
                if isinstance(pixels, Pixels) and isinstance(pixels.segmentation_input, Series):
                    active_job.open_files = stack.pop_all()
                return pixels

    def _schedule_retry(self, active_job: ActiveJob, error: Exception, step: Callable[[], None]) -> bool:
        """Schedule a retry after a storage error. Return False for other errors, or if the retry time has elapsed."""
        if not isinstance(error, OutOfStorage | StorageUnavailable) or active_job.job.cancelled() or self._is_stopped:
            return False
        now = time.monotonic()
        if active_job.first_error_time is None:
            active_job.first_error_time = now
            log.warning("job %s: %s Retrying for %g s", active_job.id, error, self.retry_seconds)
        if now - active_job.first_error_time > self.retry_seconds:
            log.error("job %s has failed: %s", active_job.id, error)
            return False
        self._retries.append(step)
        return True

    def _estimate_needs(self, active_job: ActiveJob) -> ResourceNeeds:
        assert active_job.pixels is not None  # noqa: S101 - the file has already been read
        return active_job.reservation.estimate_needs(active_job.pixels.segmentation_input, active_job.query.options)

    def _segment_folder(self, active_job: ActiveJob, job: Job[Result | FolderOutcome]) -> FolderOutcome:
        """Segment the stacks in a folder, in a thread of the folder queue."""
        if self._runtime.is_draining or not self._begin_job(active_job):
            raise Cancelled("The job was canceled before it began.")
        active_job.stages.add("queue", job.seconds_waited)
        reset_attempts = partial(self._store.reset_attempts, active_job.id)
        active_job.folder_run = FolderRun(
            self._runtime, active_job.query, active_job.request.model, job, active_job.space, reset_attempts
        )
        with active_job.stages.measure("stacks"):
            return active_job.folder_run.run()

    def _segment(self, active_job: ActiveJob, job: Job[Result | FolderOutcome]) -> Result:
        """Segment a volume or a series, in a thread of the device queue."""
        if self._runtime.is_draining or active_job.pixels is None or not self._begin_job(active_job):
            raise Cancelled("The job was canceled before it began.")
        active_job.stages.add("queue", max(job.seconds_waited - active_job.stages.seconds["read"], 0.0))
        return segment_pixels(
            active_job.reservation, job, active_job.pixels.segmentation_input, active_job.query.options
        )

    def _begin_job(self, active_job: ActiveJob) -> bool:
        """Record that the job is running. Return False if the job must not run. Ignore storage errors."""
        try:
            return self._store.begin(active_job.id)
        except (OutOfStorage, StorageUnavailable) as error:
            log.warning("the start of job %s cannot be recorded: %s", active_job.id, error)
            return not active_job.job.cancelled()

    def _on_work_done(self, job_id: str, future: Future[Result | FolderOutcome]) -> None:
        """Pass the result to a write thread, so that the current thread can continue with the next job."""
        if self._is_stopped:
            return
        with self._lock:
            active_job = self._active_jobs[job_id]
        self._write_later(active_job, future)

    def _write_later(self, active_job: ActiveJob, future: Future[Result | FolderOutcome]) -> None:
        self._writers.submit(self._write_or_fail, active_job, future)

    def _write_or_fail(self, active_job: ActiveJob, future: Future[Result | FolderOutcome]) -> None:
        """Write the result or the failure of a job, in a write thread."""
        error = Cancelled("The job was canceled.") if future.cancelled() else future.exception()
        if error is None:
            try:
                self._write_result(active_job, future.result())
            except Exception as failure:  # noqa: BLE001 - reported as the failure of the job
                if self._schedule_retry(active_job, failure, partial(self._write_later, active_job, future)):
                    return
                active_job.log_unexpected_error(failure)
                # If the service stops during the retries, leave the job to the next process, which may find more space.
                is_interrupted = active_job.job.cancelled() and isinstance(failure, OutOfStorage | StorageUnavailable)
                error = Cancelled("The job was canceled before its result was written.") if is_interrupted else failure
                with suppress(StackSegError, OSError):
                    confirm_delivery(self._runtime.host_files, self._make_request(active_job))
        self._end_job(active_job, error)

    def _write_result(self, active_job: ActiveJob, result: Result | FolderOutcome) -> None:
        if isinstance(result, FolderOutcome):
            self._write_folder_result(active_job, result)
            return
        assert active_job.pixels is not None  # noqa: S101 - the pixels have already been segmented
        store, host_files = self._store, self._runtime.host_files
        active_job.stages.update(result.seconds)
        request = self._make_request(active_job)
        with translate_disk_errors():
            # If the input is a file on the host, the uploaded file is empty.
            if active_job.query.input is None and request.source.is_file():
                request = request._replace(digest=hash_file(request.source))
            answer = write_answer(host_files, request, active_job.pixels.measurement_input, result)
            active_job.stages.update(answer.seconds)
            metadata = describe_answer(active_job.request.name, answer, result, active_job.stages.seconds)
            partial_failure = result.series.error if result.series else None
            is_finished = store.finish(active_job.id, answer.path, metadata, partial_failure)
            confirm_delivery(host_files, request)
            if not is_finished:
                return
        object_count, seconds = result.segmentation.count, active_job.stages.seconds
        self._runtime.metrics.count_segmentation(
            active_job.request.model, active_job.pixels.segmentation_input.voxel_count, object_count, seconds
        )

    def _write_folder_result(self, active_job: ActiveJob, outcome: FolderOutcome) -> None:
        assert active_job.folder_run is not None  # noqa: S101 - the run created the results
        metadata, content = active_job.folder_run.describe(
            outcome, active_job.request.name, dict(active_job.stages.seconds)
        )
        receipt = self._store.get_input_path(active_job.id).parent / RECEIPT_FILE
        with translate_disk_errors():
            receipt.write_text(content, encoding="utf-8")
            self._store.finish(active_job.id, receipt, metadata)

    def _make_request(self, active_job: ActiveJob) -> SegmentationRequest:
        source = self._store.get_input_path(active_job.id)
        name, cancelled = active_job.request.name, active_job.job.cancelled
        return SegmentationRequest(active_job.query, source, source.parent, active_job.owner, cancelled, name)

    def _end_job(self, active_job: ActiveJob, error: BaseException | None) -> None:
        """Record how the job ended. If the service canceled the job, the job waits for the next process."""
        try:
            active_job.delete_pixels()
            if isinstance(error, Cancelled):
                self._store.requeue(active_job.id)
            elif isinstance(error, DeviceLost):
                log.error("job %s will be resumed after a restart of the service", active_job.id)
            elif error is not None:
                self.unrecorded_ends.add(active_job.id, to_public_error(error))
                if active_job.id in self.unrecorded_ends:
                    log.error("the failure of job %s cannot be recorded yet: %s", active_job.id, error)
            self._store.delete_unneeded_files(active_job.id)
        except (OutOfStorage, StorageUnavailable) as storage_error:
            log.warning("job %s has ended, but its files cannot be deleted yet: %s", active_job.id, storage_error)
        except Exception:
            log.exception("unexpected failure at the end of job %s", active_job.id)
        finally:
            with self._lock:
                del self._active_jobs[active_job.id]
            active_job.space.close()
            active_job.end_event.set()
