"""Jobs that are answered later: accepted, shown, cancelled, kept, run again after a crash, deleted."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from service.core.config import Settings
from service.core.errors import BadParameter, NotFinished, NotReady, ResultGone
from service.core.types import Description
from service.serving.devices.queue.job_queue import JobQueue
from service.serving.devices.queue.threads import JobThreads
from service.serving.jobs.active_job import JobView, view_job, wait_until_over
from service.serving.jobs.folder_run import FolderPlaces
from service.serving.jobs.record import JobRecord, JobRequest
from service.serving.jobs.runner import JobRunner
from service.serving.jobs.store import INPUT, JobStore
from service.serving.runtime import JOIN_SECONDS, Runtime
from service.serving.storage.disk import DiskUsage, measure_disk
from service.serving.storage.stack_store import StackStore
from service.serving.storage.threads import begin_threads

if TYPE_CHECKING:
    from service.serving.parameters import SegmentationRequest
    from service.serving.results.metadata import AnswerMetadata

WRITE_THREADS = 2
# Jobs on folders that run at a time: each has one stack at a device.
FOLDERS_AT_ONCE = 4
CLEAN_UP_SECONDS = 60.0
# How often folders are looked after, and steps that a fault of the storage has stopped are tried again.
TICK_SECONDS = 1.0

log = logging.getLogger(__name__)


class AsyncJobs:
    """The jobs folder and the jobs in it. All methods but `start` wait for a disk at most.

    `keep_seconds`: how long a job is kept once it is over. Methods raise OutOfStorage and StorageUnavailable as
    `JobStore` does. Raises ConfigError for a jobs folder that cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.keep_seconds = settings, settings.jobs.keep_hours * 3600
        self._store: JobStore
        self.stacks: StackStore
        # None until the jobs have started.
        self._folder: Path | None = None
        if settings.jobs.folder is not None:
            self._store = self._open_store(settings.jobs.folder)
        self.runner: JobRunner
        self._problem: str | None = None
        self._cleaned = time.monotonic()
        self._stopped = threading.Event()
        self._runtime: Runtime
        # Jobs on folders queue their stacks one by one at devices.
        self._folders = JobQueue(settings.limits.waiting, FOLDERS_AT_ONCE, shared=len(settings.access.keys) > 1)
        self._folder_threads = JobThreads("folder", self._folders.take, FOLDERS_AT_ONCE)
        self._keeper = threading.Thread(target=self._keep_storage, name="storage", daemon=True)

    def start(self, runtime: Runtime) -> None:
        """Run the jobs that an earlier process left behind. The runtime starts before this, and stops after it."""
        self._runtime = runtime
        self._folder = self._settings.jobs.folder or runtime.scratch.path
        if self._settings.jobs.folder is None:
            self._store = self._open_store(runtime.scratch.path / "jobs")
        self._writers = begin_threads(WRITE_THREADS, "write")
        self.runner = JobRunner(runtime, self._store, self._folders, self._writers)
        for record in self._store.recover():
            try:
                active = self.runner.activate(record.id, record.request, record.owner)
            except Exception as error:
                # Such as one with parameters of another version; it keeps no other from running.
                log.exception("job %s of an earlier process cannot run", record.id)
                self._store.fail(record.id, error)
                continue
            log.info("job %s of an earlier process runs again", record.id)
            active.queue.put(active.job)
            self.runner.prepare(active)
        self._folder_threads.start()
        runtime.checks.append(lambda: self._problem)
        runtime.unfinished.append(self._is_busy)
        self._keeper.start()

    def stop(self) -> None:
        """Leave waiting jobs on disk, let running ones finish within the time to drain, close the store."""
        jobs = self.runner.jobs
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
        self.runner.stop()
        # It hands work to the threads that write.
        if self._keeper.ident is not None:
            self._keeper.join()
        self._writers.shutdown()
        self.runner.record_failures()
        self._store.close()

    def measure_jobs(self) -> DiskUsage:
        """Measure the files of jobs. Raises NotReady before the jobs have started."""
        return measure_disk(self._started_folder(), self._store.nbytes, self._settings.jobs.quota_bytes)

    def measure_stacks(self) -> DiskUsage:
        """Measure the stacks that were uploaded to be kept. Raises NotReady before the jobs have started."""
        return measure_disk(self._started_folder(), self.stacks.nbytes, self._settings.jobs.stacks_bytes)

    def _started_folder(self) -> Path:
        if self._folder is None:
            raise NotReady("The jobs have not started.")
        return self._folder

    def _is_busy(self) -> bool:
        """Whether a job runs or is being written."""
        return any(active.job.state != "waiting" for active in self.runner.jobs)

    def make_incoming(self) -> Path:
        """Make a folder for a file that arrives, for `submit`. A full disk raises OutOfStorage."""
        return self._store.make_incoming()

    def submit(
        self, received: SegmentationRequest, name: str, description: Description, receive_seconds: float
    ) -> JobView:
        """Accept a request in a folder of `make_incoming`; when this returns, the job outlives the process.

        The folder has the file that arrived, as INPUT, or an empty one if the query names a file of the host. Either
        was found to be as described, and is read when the job's turn comes. Raises BadParameter where no volume can be
        read of it, what `Runtime.estimate` raises, QueueFull and NotReady.
        """
        if description.problem:
            raise BadParameter(description.problem, parameter="time", suggested={"time": "all"})
        query, runtime = received.query, self._runtime
        spec = runtime.models.spec(query.model)
        windows = description.volumes * runtime.estimate(spec, description, query.options).windows
        parameters = query.model_dump(mode="json", exclude_unset=True)
        return self._accept(received, JobRequest(spec.name, parameters, name, windows, receive_seconds))

    def submit_folder(self, received: SegmentationRequest, name: str, receive_seconds: float) -> JobView:
        """Accept a request whose query names a folder of stacks, as `submit` does; its results outlive the job.

        Raises BadParameter where the folders cannot be used, what `Estimator.plan` raises, QueueFull and NotReady.
        """
        query, runtime = received.query, self._runtime
        spec = runtime.models.spec(query.model)
        runtime.estimator(spec).plan(query.options)
        places = FolderPlaces.of(query, received.caller)
        places.check(runtime.host_files, overwrite=bool(query.overwrite))
        place = f"{places.stacks.removesuffix('/')}/"
        parameters = query.model_dump(mode="json", exclude_unset=True) | {"input": place}
        return self._accept(received, JobRequest(spec.name, parameters, name, 0, receive_seconds))

    def _accept(self, received: SegmentationRequest, request: JobRequest) -> JobView:
        active = self.runner.activate(received.folder.name, request, received.caller)
        try:
            # A model is deleted where no job is for it, which this one is since it was activated.
            self._runtime.models.servable_spec(request.model)
            active.queue.offer(active.job)
            self._store.accept(received.folder / INPUT, received.caller, request)
        except BaseException:
            active.job.cancel()
            raise
        self.runner.prepare(active)
        return self.view(active.id, received.caller)

    def view(self, job: str, owner: str | None) -> JobView:
        """Return a job of this owner. Raises UnknownJob."""
        return self._view(self._find(job, owner))

    def newest(self, owner: str | None, limit: int) -> list[JobView]:
        """Return the newest jobs of this owner, newest first."""
        return [self._view(self._with_failure(record)) for record in self._store.newest(owner, limit)]

    def uses(self, model: str) -> bool:
        """Return whether a job that waits or runs is for this model."""
        return any(active.request.model == model for active in self.runner.jobs)

    def cancel(self, job: str, owner: str | None) -> None:
        """Cancel a job that waits or runs; delete one that is over, with its result. Raises UnknownJob."""
        self._store.find(job, owner)
        if not self._store.cancel(job):
            self._store.delete(job)
            return
        if (active := self.runner.find(job)) is not None:
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
        failed = self.runner.unrecorded.get(record.id)
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
        return view_job(record, self.runner.find(record.id))

    def _keep_storage(self) -> None:
        """Look after the folders, try again what a fault has stopped, delete what is old."""
        while not self._stopped.wait(TICK_SECONDS):
            for step in (self._mend, self.runner.retry, self.runner.record_failures, self._clean_up):
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
