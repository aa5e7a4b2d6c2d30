"""A job of this process that is not over, and what its owner sees of it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from service.core.errors import StackSegError
from service.core.hardware.devices import translate_error
from service.core.telemetry import Stages
from service.serving.devices.queue.job import Job, Progress
from service.serving.parameters import Query

if TYPE_CHECKING:
    from service.inference.types import Result
    from service.serving.devices.reservation import Reservation
    from service.serving.jobs.folder_run import FolderRun
    from service.serving.jobs.folder_work import Done
    from service.serving.jobs.record import JobRecord, JobRequest
    from service.serving.reading import Pixels
    from service.serving.storage.scratch import Hold

log = logging.getLogger(__name__)


class JobView(NamedTuple):
    """A job as its owner sees it: the record on disk, and how far this process has come with it.

    position      1 for the job whose turn is next; None for a job that does not wait
    seconds_left  until the result is there; None if unknown
    seconds       by stage, as far as the job has come
    loading       whether the job waits for its model to be loaded
    stage         that a job which runs is at, by its name in `seconds`
    points        time points that are done, of a series, or stacks of a folder; 0 of 0 for one volume
    """

    record: JobRecord
    progress: Progress
    position: int | None = None
    seconds_left: float | None = None
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    loading: bool = False
    stage: str | None = None
    points: Progress = Progress()


class ActiveJob:
    """A job of this process that is not over.

    folder  has its decoded pixels
    files   what a series is read from, open until the job is over
    spec    is set once it is read
    queue   in which it waits
    run     of a folder that is being segmented
    """

    def __init__(self, number: str, request: JobRequest, owner: str | None, reservation: Reservation) -> None:
        self.id, self.request, self.owner, self.reservation = number, request, owner, reservation
        self.query = Query.model_validate(request.parameters)
        self.stages = Stages()
        self.stages.add("receive", request.receive_seconds)
        self.folder: Path | None = None
        self.files = ExitStack()
        self.pixels: Pixels | None = None
        # When the storage first failed the step that the job is at, on the clock of `time.monotonic`.
        self.faulted: float | None = None
        # Whether it was told that there is no space for its decoded pixels.
        self.waits_for_space = False
        self.over = threading.Event()
        self.space: Hold
        self.queue = reservation.queue
        self.run: FolderRun | None = None
        self.job: Job[Result | Done]

    def delete_pixels(self) -> None:
        self.files.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_unexpected(self, error: BaseException | None) -> None:
        """Log an error that is none of StackSeg's own."""
        if error is not None and not isinstance(translate_error(error), StackSegError):
            log.error("unexpected failure of job %s", self.id, exc_info=error)

    @property
    def stage(self) -> str | None:
        """The stage that the job is at, by its name in `seconds`; None while it waits."""
        if self.run is not None:
            return self.run.stage
        done, total = self.job.progress
        match self.job.state:
            case "waiting":
                return None
            case "running" if done < total:
                return "windows"
            case "running":
                return "decode" if total else "prepare"
            case _:
                return "write"


def view_job(record: JobRecord, active: ActiveJob | None) -> JobView:
    """Return what the owner of a job sees; None: it is over, or no job of this process."""
    if record.over or active is None:
        return _view_over(record)
    job, queue = active.job, active.queue
    if (run := active.run) is not None:
        return JobView(
            record, run.stacks, None, run.seconds_left, dict(active.stages.seconds), stage=run.stage, points=run.stacks
        )
    return JobView(
        record,
        queue.progress(job),
        queue.position(job),
        queue.seconds_left(job),
        dict(active.stages.seconds),
        active.reservation.loading,
        active.stage,
        job.points,
    )


def _view_over(record: JobRecord) -> JobView:
    """Return a job of which this process knows no more than the record."""
    answer, windows = record.answer, record.request.windows
    if answer is None:
        return JobView(record, Progress(0, windows))
    if answer.stacks:
        stacks = Progress(*answer.stacks)
        return JobView(record, stacks, seconds=answer.seconds, points=stacks)
    points = Progress(*answer.time_points) if answer.time_points else Progress()
    done = windows * points.done // points.total if points.total else windows
    progress = Progress(done if record.state == "done" else 0, windows)
    return JobView(record, progress, seconds=answer.seconds, points=points)


def wait_until_over(jobs: Iterable[ActiveJob], seconds: float) -> None:
    """Wait until all of the jobs are over, for so many seconds in all."""
    deadline = time.monotonic() + seconds
    for active in jobs:
        active.over.wait(max(deadline - time.monotonic(), 0.0))
