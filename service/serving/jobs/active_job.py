"""An unfinished job of this process, the view of a job for its owner, and ends that are not in the database yet."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from service.core.errors import OutOfStorage, StackSegError, StorageUnavailable
from service.core.hardware.devices import translate_error
from service.core.telemetry import Stages
from service.serving.devices.queue.job import Job, Progress
from service.serving.parameters import Query

if TYPE_CHECKING:
    from service.inference.types import Result
    from service.serving.devices.reservation import Reservation
    from service.serving.jobs.folders.job_run import FolderRun
    from service.serving.jobs.folders.segment_folder import FolderOutcome
    from service.serving.jobs.record import JobRecord, JobRequest
    from service.serving.jobs.store import JobStore
    from service.serving.reading import Pixels
    from service.serving.storage.scratch import SpaceReservation

log = logging.getLogger(__name__)


class JobView(NamedTuple):
    """A job as shown to its owner: the record on disk and the progress in this process.

    position       position in the queue, 1 for the next job; None if the job is not waiting
    seconds_left   estimated time until the result is available; None if unknown
    stage_seconds  seconds spent in each stage so far
    is_loading     whether the job is waiting for its model to load
    stage          current stage of a running job, one of the keys of `stage_seconds`
    part_progress  number of finished parts and of all parts, where a part is a time point of a series or a stack in a
                   folder; both numbers are 0 for a single volume
    """

    record: JobRecord
    progress: Progress
    position: int | None = None
    seconds_left: float | None = None
    stage_seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    is_loading: bool = False
    stage: str | None = None
    part_progress: Progress = Progress()


class ActiveJob:
    """An unfinished job of this process.

    pixel_folder  scratch folder with the decoded pixels
    open_files    files from which a series is read; closed when the job ends
    pixels        decoded pixels; None until the file has been read
    reservation   reservation of a device and of the model
    space         reserved scratch space; set after construction
    queue         queue in which the job waits
    folder_run    run on a folder of stacks; None before the run begins, and for jobs on a single file
    job           the job in the queue; set after construction
    """

    def __init__(self, job_id: str, request: JobRequest, owner: str | None, reservation: Reservation) -> None:
        self.id, self.request, self.owner, self.reservation = job_id, request, owner, reservation
        self.query = Query.model_validate(request.parameters)
        self.stages = Stages()
        self.stages.add("receive", request.receive_seconds)
        self.pixel_folder: Path | None = None
        self.open_files = ExitStack()
        self.pixels: Pixels | None = None
        # Time (`time.monotonic`) of the first storage error in the current step.
        self.first_error_time: float | None = None
        # Whether the log already contains a message about missing space for the decoded pixels of this job.
        self.has_logged_missing_space = False
        self.end_event = threading.Event()
        self.space: SpaceReservation
        self.queue = reservation.queue
        self.folder_run: FolderRun | None = None
        self.job: Job[Result | FolderOutcome]

    def delete_pixels(self) -> None:
        """Close the input files and delete the decoded pixels."""
        self.open_files.close()
        if self.pixel_folder is not None:
            shutil.rmtree(self.pixel_folder, ignore_errors=True)

    def log_unexpected_error(self, error: BaseException | None) -> None:
        """Log an error that is not a `StackSegError`."""
        if error is not None and not isinstance(translate_error(error), StackSegError):
            log.error("unexpected failure of job %s", self.id, exc_info=error)

    @property
    def stage(self) -> str | None:
        """The current stage, one of the keys of `JobView.stage_seconds`; None while the job is waiting."""
        if self.folder_run is not None:
            return self.folder_run.stage
        done_count, total_count = self.job.progress
        match self.job.state:
            case "waiting":
                return None
            case "running" if done_count < total_count:
                return "windows"
            case "running":
                return "decode" if total_count else "prepare"
            case _:
                return "write"


def view_job(record: JobRecord, active_job: ActiveJob | None) -> JobView:
    """Return the owner's view of a job. `active_job` is None if the job is not active in this process."""
    if record.has_ended or active_job is None:
        return _view_from_record(record)
    job, queue = active_job.job, active_job.queue
    if (run := active_job.folder_run) is not None:
        return JobView(
            record,
            run.progress,
            None,
            run.seconds_left,
            dict(active_job.stages.seconds),
            stage=run.stage,
            part_progress=run.progress,
        )
    return JobView(
        record,
        queue.get_progress(job),
        queue.get_position(job),
        queue.estimate_seconds_left(job),
        dict(active_job.stages.seconds),
        active_job.reservation.is_loading,
        active_job.stage,
        job.time_points,
    )


def _view_from_record(record: JobRecord) -> JobView:
    """Return the view of a job based only on its record."""
    metadata, window_count = record.result_metadata, record.request.window_count
    if metadata is None:
        return JobView(record, Progress(0, window_count))
    if metadata.stacks:
        stack_progress = Progress(*metadata.stacks)
        return JobView(record, stack_progress, stage_seconds=metadata.seconds, part_progress=stack_progress)
    part_progress = Progress(*metadata.time_points) if metadata.time_points else Progress()
    done_count = window_count * part_progress.done // part_progress.total if part_progress.total else window_count
    progress = Progress(done_count if record.state == "done" else 0, window_count)
    return JobView(record, progress, stage_seconds=metadata.seconds, part_progress=part_progress)


def wait_for_jobs(jobs: Iterable[ActiveJob], timeout_seconds: float) -> None:
    """Wait until all jobs have ended, for at most `timeout_seconds` in total."""
    deadline = time.monotonic() + timeout_seconds
    for active_job in jobs:
        active_job.end_event.wait(max(deadline - time.monotonic(), 0.0))


class UnrecordedEnd(NamedTuple):
    """The end of a job.

    failure  error that made the job fail; None if the job was canceled
    time     in seconds since the Unix epoch
    """

    failure: StackSegError | None
    time: float


class UnrecordedEnds:
    """The ends of jobs in memory, until `record` can write them to the database."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._ends: dict[str, UnrecordedEnd] = {}

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._ends

    def add(self, job_id: str, failure: StackSegError | None) -> None:
        """Add the end of a job, and record it if possible. `failure` is None for a canceled job, which has priority."""
        if failure is None or job_id not in self._ends:
            self._ends[job_id] = UnrecordedEnd(failure, time.time())
        if failure is None:
            # This may free the space for the record. A job without its input is not resumed if the process is killed.
            with suppress(OSError):
                self._store.get_input_path(job_id).unlink(missing_ok=True)
        self.record()

    def record(self) -> None:
        """Write the ends to the database. The next call retries those that cannot be written yet."""
        for job_id, end in list(self._ends.items()):
            with suppress(OutOfStorage, StorageUnavailable, OSError):
                # Deleting a partial result may free the space for the record.
                self._store.delete_unneeded_files(job_id)
                if end.failure is None:
                    self._store.cancel(job_id)
                else:
                    self._store.fail(job_id, end.failure)
                self._ends.pop(job_id, None)
                self._store.delete_unneeded_files(job_id)

    def add_to(self, record: JobRecord) -> JobRecord:
        """Return the record of a job with its end, unless the database already contains an end."""
        end = self._ends.get(record.id)
        if end is None or record.has_ended:
            return record
        return replace(
            record, state="cancelled" if end.failure is None else "failed", failure=end.failure, ended=end.time
        )
