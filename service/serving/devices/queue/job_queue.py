"""The bounded job queue of a device."""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, deque
from typing import Any

from service.core.errors import NotReady, QueueFull
from service.serving.devices.queue.durations import JobDurations
from service.serving.devices.queue.job import Job, Progress, ResourceNeeds
from service.serving.devices.queue.memory import JobMemory

# Number of batches for which windows should be available: one that is being processed, one that is being prepared, and
# one more in case preparation takes longer than processing.
BATCHES_AHEAD = 3
# A running job has priority over a waiting job only if the remaining work of the running job is less than this multiple
# of the work of the waiting job.
REMAINING_WORK_FACTOR = 2
# Maximum number of recent jobs whose median duration determines when a client should retry.
RECENT_JOB_COUNT = 16
# Seconds after which a client should retry if no job has been timed.
DEFAULT_RETRY_SECONDS = 5
# Maximum if the remaining time of running jobs is unknown, and if it is known. They may be canceled earlier.
MAX_RETRY_SECONDS = 120
MAX_KNOWN_RETRY_SECONDS = 3600


class JobQueue:
    """A queue that is fair to owners, prefers short jobs, and prevents starvation.

    Order: Owners are served in round-robin order (Nagle 1987). The first job of every owner precedes the second job of
    any owner; running jobs count as well. Within a round, the job with the earliest deadline is first (Liu and Layland
    1973). The deadline of a job is its creation time plus its duration on an otherwise idle device. A small job
    therefore overtakes a large one that was queued shortly before. A large job can be overtaken only by jobs that are
    created within its own duration, which bounds its waiting time.

    Start: A job starts if fewer than `guaranteed_job_count` jobs are running, if the running jobs would soon leave the
    device idle, or if it will be done long before the running jobs are. In addition, enough memory must be free, unless
    no other job is running. A job that waits for memory can be overtaken by jobs that fit.

    Capacity: If owners share the queue, an owner may use at most as many places as remain free (dynamic thresholds,
    Choudhury and Hahne 1998). A single owner gets up to half of the places, two owners a third each, and there is
    always a place for another owner.

    max_waiting           maximum number of waiting jobs, in addition to one that is running
    max_running           maximum number of running jobs
    memory                decides whether a job fits in memory
    is_shared             whether several owners share the queue
    guaranteed_job_count  number of jobs that may run regardless of how busy the device is
    """

    def __init__(
        self,
        max_waiting: int,
        max_running: int = 16,
        memory: JobMemory | None = None,
        *,
        is_shared: bool = False,
        guaranteed_job_count: int = 1,
    ) -> None:
        self._max_waiting, self._is_shared = max_waiting, is_shared
        self.max_running, self._guaranteed_job_count = max_running, guaranteed_job_count
        self._memory = memory or JobMemory()
        self._durations = JobDurations()
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_JOB_COUNT)
        self._waiting_jobs: list[Job[Any]] = []
        self._running_jobs: dict[Job[Any], ResourceNeeds] = {}
        self._is_closed = False
        self._condition = threading.Condition()
        # Whether a thread has been notified and has not searched for a job yet.
        self._has_notified_thread = False

    @property
    def waiting_count(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting_jobs)

    @property
    def running_jobs(self) -> tuple[Job[Any], ...]:
        """The running jobs."""
        with self._condition:
            return tuple(self._running_jobs)

    @property
    def jobs(self) -> tuple[Job[Any], ...]:
        """The running jobs, followed by the waiting jobs in their order."""
        with self._condition:
            return (*self._running_jobs, *self._waiting_jobs)

    def is_full(self, owner: str | None = None) -> bool:
        """Return whether the queue refuses further jobs from this owner."""
        with self._condition:
            jobs = self.jobs
            free_places = self._max_waiting + 1 - len(jobs)
            return free_places <= (sum(job.owner == owner for job in jobs) if self._is_shared else 0)

    @property
    def expected_seconds(self) -> float:
        """Estimated device time of all waiting and running jobs in seconds."""
        with self._condition:
            return sum(self._durations.estimate_device_seconds(job) for job in self.jobs)

    def check_admission(self, owner: str | None = None) -> None:
        """Raise the error that `offer` would raise now: NotReady, or QueueFull with the seconds until a retry."""
        with self._condition:
            if self._is_closed:
                raise NotReady("The service is stopping. Send the request again after it has restarted.")
            if self.is_full(owner):
                scope = " for requests with this API key" if self._is_shared else ""
                message = f"The queue is full{scope}: {len(self._waiting_jobs)} requests are waiting. Try again later."
                raise QueueFull(message, self._estimate_retry_seconds())

    def _estimate_retry_seconds(self) -> int:
        """Estimate the seconds until a running job ends, from its progress or the median duration of recent jobs."""
        estimates = map(self._durations.estimate_seconds_until_last_window, self._running_jobs)
        known_seconds = [seconds for seconds in estimates if seconds is not None]
        if known_seconds:
            return min(max(math.ceil(min(known_seconds)), 1), MAX_KNOWN_RETRY_SECONDS)
        if not self._recent_seconds:
            return DEFAULT_RETRY_SECONDS
        max_seconds_run = max((job.seconds_run for job in self._running_jobs), default=0.0)
        seconds_left = statistics.median(self._recent_seconds) - max_seconds_run
        return min(max(math.ceil(seconds_left), 1), MAX_RETRY_SECONDS)

    def offer(self, job: Job[Any]) -> None:
        """Add a job. Raises QueueFull or NotReady without blocking."""
        with self._condition:
            self.check_admission(job.owner)
            self.put(job)
        job.add_done_callback(self._record_duration)

    def put(self, job: Job[Any]) -> None:
        """Add a job even if the queue is full, such as a job that an earlier process accepted."""
        with self._condition:
            job.deadline = job.creation_time + self._durations.estimate_device_seconds(job)
            job.on_advance, job.on_needs_changed = self._on_advance, self.update_needs
            self._waiting_jobs.append(job)
            self._sort()
            self._notify()
        job.add_done_callback(self._remove)

    def mark_ready(self, job: Job[Any]) -> None:
        """Mark a job as ready, so that it may start."""
        with self._condition:
            job.is_ready = True
            self._notify()

    def take(self) -> Job[Any] | None:
        """Wait for the next job that may start; return None when the queue is closed and empty."""
        with self._condition:
            while not (self._is_closed and not self._waiting_jobs):
                self._has_notified_thread = False
                if (job := self._find_next_job()) is not None:
                    self._waiting_jobs.remove(job)
                    job.shared_start_seconds = self._durations.update_shared_seconds(
                        job.clock(), len(self._running_jobs)
                    )
                    self._running_jobs[job] = job.needs()
                    self._sort()
                    # Another thread may start another job in addition to this one.
                    self._notify()
                    return job
                self._condition.wait()
            return None

    def update_needs(self, job: Job[Any], needs: ResourceNeeds) -> None:
        """Change the recorded resource needs of a running job; do nothing for other jobs."""
        with self._condition:
            if job in self._running_jobs:
                self._running_jobs[job] = needs

    def close(self) -> None:
        """Stop accepting jobs. Waiting jobs still run."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def cancel_all(self) -> None:
        """Cancel all waiting and running jobs."""
        for job in self.jobs:
            job.cancel()

    def get_position(self, job: Job[Any]) -> int | None:
        """Return the position of a waiting job, starting at 1 for the next one; None for a job that is not waiting."""
        with self._condition:
            return self._waiting_jobs.index(job) + 1 if job in self._waiting_jobs else None

    def estimate_seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds until a job is done, including the jobs before it; return None if unknown."""
        with self._condition:
            durations = self._durations
            finishing_seconds = durations.estimate_finishing_seconds_left(job)
            if job in self._running_jobs:
                seconds_left = durations.estimate_seconds_until_last_window(job)
                return None if seconds_left is None or finishing_seconds is None else seconds_left + finishing_seconds
            if job not in self._waiting_jobs:
                return None
            seconds_before = [
                durations.estimate_seconds_until_last_window(other)
                for other in self._waiting_jobs[: self._waiting_jobs.index(job) + 1]
            ]
            # Running jobs share the device, so all of them are done when the longest one is done.
            running_seconds = [durations.estimate_seconds_until_last_window(other) for other in self._running_jobs]
        if None in seconds_before or None in running_seconds:
            return None
        return (
            sum(filter(None, seconds_before))
            + max(filter(None, running_seconds), default=0.0)
            + (finishing_seconds or 0.0)
        )

    def estimate_new_job_seconds(self, model_name: str, window_count: int) -> float | None:
        """Estimate the seconds until a new job with this many windows would be done; return None if unknown.

        A job that starts immediately waits for jobs with less work. Jobs with more work get every second batch.
        """
        with self._condition:
            seconds = self._durations.estimate_new_job_seconds(model_name, window_count)
            if seconds is None:
                return None
            other_seconds = [self._durations.estimate_device_seconds(job) for job in self.jobs]
            starts_immediately = len(self._running_jobs) < self.max_running and all(
                job.clock() + seconds < job.deadline for job in self._waiting_jobs
            )
        if not starts_immediately:
            return seconds + sum(other_seconds)
        seconds_of_larger_jobs = sum(other for other in other_seconds if other > seconds)
        seconds += sum(other for other in other_seconds if other <= seconds)
        return seconds + min(seconds, seconds_of_larger_jobs)

    def get_progress(self, job: Job[Any]) -> Progress:
        """Return the progress of a job in windows. The finishing phase counts as an equivalent number of windows."""
        return self._durations.compute_progress(job)

    def _sort(self) -> None:
        """Order the waiting jobs by round, and within a round by deadline."""
        if len(self._waiting_jobs) < 2:
            return
        rounds = Counter(job.owner for job in self._running_jobs)
        sort_keys: dict[Job[Any], tuple[int, float]] = {}
        for job in sorted(self._waiting_jobs, key=lambda job: job.deadline):
            sort_keys[job] = rounds[job.owner], job.deadline
            rounds[job.owner] += 1
        self._waiting_jobs.sort(key=sort_keys.__getitem__)

    def _find_next_job(self) -> Job[Any] | None:
        """Return the next job if one may start now, else None."""
        if len(self._running_jobs) >= self.max_running:
            return None
        blocked_needs: ResourceNeeds | None = None
        blocked_owners = self._find_blocked_owners()
        for job in self._waiting_jobs:
            if job.is_ready and job.owner not in blocked_owners and self._is_useful(job, needs := job.needs()):
                if self._memory.fits(needs, blocked_needs, self._running_jobs.values()):
                    return job
                blocked_needs = blocked_needs or needs
        return None

    def _find_blocked_owners(self) -> set[str | None]:
        """Return the owners whose waiting jobs may not start.

        The last slot for running jobs is reserved for an owner without a running job.
        """
        is_last_slot = self._is_shared and len(self._running_jobs) == self.max_running - 1
        return {job.owner for job in self._running_jobs} if is_last_slot else set()

    def _is_useful(self, job: Job[Any], needs: ResourceNeeds) -> bool:
        """Return whether the next batches would have slots for windows of the job.

        Windows of running jobs with less work come first.
        """
        if len(self._running_jobs) < self._guaranteed_job_count:
            return True
        durations = self._durations
        max_seconds = REMAINING_WORK_FACTOR * durations.estimate_device_seconds(job)
        seconds_ahead = sum(
            seconds for seconds in map(durations.estimate_device_seconds, self._running_jobs) if seconds < max_seconds
        )
        # Subtract half a window, so that rounding errors do not affect the result.
        return seconds_ahead < (BATCHES_AHEAD * needs.batch_size - 0.5) * durations.estimate_window_seconds(job)

    def _on_advance(self) -> None:
        """Notify a thread when a job progresses, because another job may be useful now."""
        with self._condition:
            self._notify()

    def _notify(self) -> None:
        """Wake a thread in `take` if there is a job for it. Checking here is cheaper than waking a thread needlessly.

        A thread that was notified earlier will see all changes since then, and will notify the next thread.
        """
        if self._waiting_jobs and not self._has_notified_thread and self._find_next_job() is not None:
            self._has_notified_thread = True
            self._condition.notify()

    def _record_duration(self, job: Job[Any]) -> None:
        """Record the duration of a job, for `_estimate_retry_seconds`."""
        if job.state == "done":
            self._recent_seconds.append(job.seconds_run)

    def _remove(self, job: Job[Any]) -> None:
        with self._condition:
            self._memory.invalidate()
            self._durations.update_shared_seconds(job.clock(), len(self._running_jobs))
            if self._running_jobs.pop(job, None) is None and job in self._waiting_jobs:
                self._waiting_jobs.remove(job)
            self._durations.learn_from(job)
            self._sort()
            # When a thread takes a job, it notifies the next thread. But all threads must see that the queue is closed.
            if self._is_closed:
                self._condition.notify_all()
            else:
                self._notify()
