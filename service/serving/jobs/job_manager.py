"""Asynchronous jobs: accept, report, cancel and delete jobs, and resume them after a crash."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from service.core.config import Settings
from service.core.errors import (
    BadParameter,
    ConfigError,
    JobNotFinished,
    NotReady,
    OutOfStorage,
    ResultUnavailable,
    StackSegError,
    StorageUnavailable,
)
from service.core.types import CancellationCheck, Description
from service.serving.devices.queue.job_queue import JobQueue
from service.serving.devices.queue.threads import JobThreads
from service.serving.jobs.active_job import JobView, view_job, wait_for_jobs
from service.serving.jobs.folders.job_run import FolderPaths
from service.serving.jobs.record import IdempotencyKey, JobRecord, JobRequest
from service.serving.jobs.runner import JobRunner
from service.serving.jobs.store import INPUT_NAME, JobStore
from service.serving.runtime import JOIN_TIMEOUT_SECONDS, Runtime
from service.serving.storage.disk import DiskUsage, measure_disk
from service.serving.storage.stack_store import StackStore
from service.serving.storage.threads import start_threads

if TYPE_CHECKING:
    from service.serving.parameters import SegmentationRequest
    from service.serving.results.metadata import ResultMetadata

WRITE_THREAD_COUNT = 2
# Maximum number of concurrent jobs on folders. Each of these jobs submits one stack at a time to a device.
MAX_RUNNING_FOLDER_JOBS = 4
CLEANUP_INTERVAL_SECONDS = 60.0
# Interval between checks of the folders. Steps that failed with a storage error are retried at the same interval.
MAINTENANCE_INTERVAL_SECONDS = 1.0

log = logging.getLogger(__name__)


class JobManager:
    """The asynchronous jobs of the service. All methods except `start` and `stop` block only for disk access.

    `keep_seconds` is the time for which a finished job is retained. Methods raise OutOfStorage and StorageUnavailable
    like the methods of `JobStore`. The constructor raises ConfigError if the jobs folder cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.keep_seconds = settings, settings.jobs.keep_hours * 3600
        self._store: JobStore
        self.stacks: StackStore
        # None until `start` is called, unless the folder is configured.
        self._folder: Path | None = None
        if isinstance(settings.jobs.folder, Path):
            self._folder = settings.jobs.folder
            self._store = self._open_store(self._folder)
        # Whether jobs and stacks are deleted when the service stops.
        self.is_temporary = False
        self.runner: JobRunner
        self._problem: str | None = None
        self._last_cleanup = time.monotonic()
        self._stop_event = threading.Event()
        self._runtime: Runtime
        # Jobs on folders have a separate queue. They add their stacks one by one to the queues of the devices.
        self._folder_queue = JobQueue(
            settings.limits.waiting, MAX_RUNNING_FOLDER_JOBS, is_shared=len(settings.access.keys) > 1
        )
        self._folder_threads = JobThreads("folder", self._folder_queue.take, MAX_RUNNING_FOLDER_JOBS)
        self._maintenance_thread = threading.Thread(target=self._maintain_storage, name="storage", daemon=True)

    def start(self, runtime: Runtime) -> None:
        """Start the threads and resume unfinished jobs of an earlier process. Call this after starting the runtime."""
        self._runtime = runtime
        if self._folder is None:
            self._folder = self._open_default_store(runtime.scratch.path / "jobs")
        # The volumes of deleted stacks and jobs would keep their disk space occupied.
        self.stacks.deletion_callbacks.append(runtime.volume_cache.discard)
        self._store.deletion_callbacks.append(runtime.volume_cache.discard)
        self._writers = start_threads(WRITE_THREAD_COUNT, "write")
        self.runner = JobRunner(runtime, self._store, self._folder_queue, self._writers)
        for record in self._store.recover():
            try:
                active_job = self.runner.activate(record.id, record.request, record.owner)
            except Exception as error:
                # For example, the parameters may be from a different version. Other jobs can still run.
                log.exception("job %s of an earlier process cannot be resumed", record.id)
                self._store.fail(record.id, error)
                continue
            log.info("resuming job %s of an earlier process", record.id)
            active_job.queue.put(active_job.job)
            self.runner.prepare(active_job)
        self._folder_threads.start()
        runtime.readiness_checks.append(lambda: self._problem)
        runtime.activity_checks.append(self._has_running_jobs)
        self._maintenance_thread.start()

    def stop(self) -> None:
        """Leave waiting jobs on disk, let running jobs finish within `server.drain_seconds`, and close the store.

        Call this before the runtime is stopped.
        """
        active_jobs = self.runner.active_jobs
        for active_job in active_jobs:
            if active_job.job.state == "waiting":
                active_job.job.cancel()
        if self._runtime.is_draining:
            wait_for_jobs(active_jobs, self._settings.server.drain_seconds)
        for active_job in active_jobs:
            active_job.job.cancel()
        wait_for_jobs(active_jobs, JOIN_TIMEOUT_SECONDS)
        self._folder_queue.close()
        self._folder_threads.join(JOIN_TIMEOUT_SECONDS)
        self._stop_event.set()
        self.runner.stop()
        # The maintenance thread submits work to the write threads, so stop it first.
        if self._maintenance_thread.ident is not None:
            self._maintenance_thread.join()
        self._writers.shutdown()
        self.runner.unrecorded_ends.record()
        self._store.close()

    @property
    def store(self) -> JobStore:
        """The jobs on disk. Raises NotReady before `start`."""
        self._require_folder()
        return self._store

    def measure_jobs(self) -> DiskUsage:
        """Measure the disk usage of jobs. Raises NotReady before `start`."""
        return measure_disk(self._require_folder(), self._store.nbytes, self._settings.jobs.quota_bytes)

    def measure_stacks(self) -> DiskUsage:
        """Measure the disk usage of stored stacks. Raises NotReady before `start`."""
        return measure_disk(self._require_folder(), self.stacks.nbytes, self._settings.jobs.stacks_bytes)

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise NotReady("The service is starting. Try again in a moment.")
        return self._folder

    def _has_running_jobs(self) -> bool:
        """Return whether a job is running or its result is being written."""
        return any(active_job.job.state != "waiting" for active_job in self.runner.active_jobs)

    def make_incoming_folder(self) -> Path:
        """Create a folder for an uploaded file to be passed to `submit`. Raises OutOfStorage if the disk is full."""
        return self._store.make_incoming_folder()

    def has_key(self, client: str, value: str) -> bool:
        """Return whether a job of this client has this idempotency key."""
        return self._store.keys.contains(client, value)

    def find_repeated(self, key: IdempotencyKey, owner: str | None) -> JobView | None:
        """Return the view of the job with this key, or None. Raises BadParameter if its request was a different one."""
        job_id = self._store.keys.find_job(key)
        return None if job_id is None else self.view(job_id, owner)

    def submit(
        self,
        request: SegmentationRequest,
        name: str,
        description: Description,
        receive_seconds: float,
        key: IdempotencyKey | None = None,
    ) -> JobView:
        """Accept a request whose folder was created by `make_incoming_folder`. The accepted job survives a restart.

        The folder contains the file INPUT_NAME, which is empty if the query refers to a file on the host.
        `description` contains the metadata of the input; the pixels are read later. Raises BadParameter if no volume
        can be read from the input, QueueFull and NotReady as in `JobQueue.offer`, and the errors of `Runtime.estimate`.
        """
        if description.problem:
            parameter, value = ("time", "all") if description.example_scene is None else ("scene", "0")
            raise BadParameter(description.problem, parameter=parameter, suggested={parameter: value})
        query, runtime = request.query, self._runtime
        spec = runtime.models.get_spec(query.model)
        window_count = description.volume_count * runtime.estimate(spec, description, query.options).windows
        parameters = query.model_dump(mode="json", exclude_unset=True)
        return self._accept(request, JobRequest(spec.name, parameters, name, window_count, receive_seconds), key)

    def submit_folder(
        self,
        request: SegmentationRequest,
        name: str,
        receive_seconds: float,
        cancelled: CancellationCheck,
        key: IdempotencyKey | None = None,
    ) -> JobView:
        """Accept a request for a folder of stacks, like `submit`. Deleting the job does not delete the results.

        Raises BadParameter if the folders cannot be used. Also raises QueueFull and NotReady as in `JobQueue.offer`,
        Cancelled, and the errors of `Estimator.plan`.
        """
        query, runtime = request.query, self._runtime
        spec = runtime.models.get_spec(query.model)
        runtime.get_estimator(spec).plan(query.options)
        paths = FolderPaths.from_query(query, request.caller)
        paths.check_folders(runtime.host_files, cancelled, overwrite=bool(query.overwrite))
        folder_path = f"{paths.input_folder.removesuffix('/')}/"
        parameters = query.model_dump(mode="json", exclude_unset=True) | {"input": folder_path}
        return self._accept(request, JobRequest(spec.name, parameters, name, 0, receive_seconds), key)

    def _accept(self, request: SegmentationRequest, job_request: JobRequest, key: IdempotencyKey | None) -> JobView:
        active_job = self.runner.activate(request.folder.name, job_request, request.caller)
        try:
            # Check the model after activation, because an active job prevents deletion of the model.
            self._runtime.models.get_servable_spec(job_request.model)
            active_job.queue.offer(active_job.job)
            job_id = self._store.accept(request.folder / INPUT_NAME, request.caller, job_request, key)
        except BaseException:
            active_job.job.cancel()
            raise
        if job_id == active_job.id:
            self.runner.prepare(active_job)
        else:
            # The client has sent the request twice at the same time.
            active_job.job.cancel()
        return self.view(job_id, request.caller)

    def view(self, job_id: str, owner: str | None) -> JobView:
        """Return the view of a job of this owner. Raises UnknownJob."""
        return self._view(self._find(job_id, owner))

    def list_newest(self, owner: str | None, limit: int) -> list[JobView]:
        """Return up to `limit` jobs of this owner, newest first."""
        records = self._store.list_newest(owner, limit)
        return [self._view(self.runner.unrecorded_ends.add_to(record)) for record in records]

    def uses_model(self, model: str) -> bool:
        """Return whether an unfinished job uses this model."""
        return any(active_job.request.model == model for active_job in self.runner.active_jobs)

    def cancel(self, job_id: str, owner: str | None, *, keep_finished: bool = False) -> None:
        """Cancel an unfinished job. Delete a finished job with its result unless `keep_finished` is set.

        An active job is canceled even if this cannot be recorded yet. Raises UnknownJob.
        """
        self._store.find(job_id, owner)
        active_job = self.runner.find(job_id)
        try:
            is_cancelled = self._store.cancel(job_id)
        except (OutOfStorage, StorageUnavailable):
            if active_job is None:
                raise
            active_job.job.cancel()
            self.runner.unrecorded_ends.add(job_id, None)
            return
        if is_cancelled and active_job is not None:
            active_job.job.cancel()
        elif not is_cancelled and not keep_finished:
            self._store.delete(job_id)

    def open_result(self, job_id: str, owner: str | None) -> tuple[BinaryIO, ResultMetadata]:
        """Return the open result file and its metadata. The file stays readable if the job is deleted.

        Raises UnknownJob, JobNotFinished and ResultUnavailable. Raises the stored error if the job failed without a
        result.
        """
        record = self._find(job_id, owner)
        if record.failure is not None and record.result_metadata is None:
            raise record.failure
        if record.state == "cancelled":
            raise ResultUnavailable("The job was canceled. Submit the stack again.")
        if record.result_metadata is None:
            raise JobNotFinished(f"The job is {record.state}. Its result can be downloaded when its state is done.")
        try:
            return self._store.get_result_path(job_id).open("rb"), record.result_metadata
        except FileNotFoundError:
            raise ResultUnavailable(
                "The result was deleted, either by the operator or to free up space. Submit the stack again."
            ) from None

    def _find(self, job_id: str, owner: str | None) -> JobRecord:
        return self.runner.unrecorded_ends.add_to(self._store.find(job_id, owner))

    def _open_default_store(self, temporary_folder: Path) -> Path:
        """Open the store in the user's state folder or, if that cannot be used, in a temporary folder. Return it."""
        folder, problem = self._settings.default_jobs_folder, "The user of the service has no home directory."
        if folder is not None:
            try:
                self._store = self._open_store(folder)
            except ConfigError as error:
                problem = str(error)
            else:
                return folder
        if self._settings.jobs.folder is None:
            log.warning(
                "%s Jobs are stored in a temporary folder, and their results will be deleted when the service stops."
                " To keep them, set jobs.folder.",
                problem,
            )
        self.is_temporary = True
        self._store = self._open_store(temporary_folder)
        return temporary_folder

    def _open_store(self, folder: Path) -> JobStore:
        jobs, access = self._settings.jobs, self._settings.access
        self.stacks = StackStore(folder / "stacks", quota_bytes=jobs.stacks_bytes, keep_seconds=self.keep_seconds)
        return JobStore(
            folder,
            quota_bytes=jobs.quota_bytes,
            keep_seconds=self.keep_seconds,
            max_attempts=jobs.attempts,
            is_shared=len(access.keys) > 1,
        )

    def _view(self, record: JobRecord) -> JobView:
        return view_job(record, self.runner.find(record.id))

    def _maintain_storage(self) -> None:
        """Until the service stops, repair the folders, retry steps that failed with storage errors, and clean up."""
        while not self._stop_event.wait(MAINTENANCE_INTERVAL_SECONDS):
            for step in (
                self._repair_folders,
                self.runner.retry_failed_steps,
                self.runner.unrecorded_ends.record,
                self._clean_up,
            ):
                # Continue after an error, so that it does not block all cleanup and retries.
                try:
                    step()
                except StackSegError as error:
                    log.warning("Maintenance of the folders and jobs failed and will be retried. %s", error)
                except Exception:
                    log.exception("Maintenance of the folders and jobs failed and will be retried.")

    def _repair_folders(self) -> None:
        """Recreate deleted folders. The service is not ready until a later check finds no deleted folders."""
        problems = [problem for problem in (self._runtime.scratch.repair(), self._store.repair()) if problem]
        problem = " ".join(problems) or None
        if problem != self._problem:
            log.error("%s", problem or "The folders of the service are usable again.")
        self._problem = problem

    def _clean_up(self) -> None:
        """Delete expired jobs and stacks at regular intervals."""
        if time.monotonic() - self._last_cleanup > CLEANUP_INTERVAL_SECONDS:
            self._last_cleanup = time.monotonic()
            self._store.clean_up()
            self.stacks.clean_up()
