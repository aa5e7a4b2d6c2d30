"""The bounded job queue of a device."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from service.core.errors import NotReady, QueueFull
from service.serving.devices.queue.durations import JobDurations
from service.serving.devices.queue.job import Job, Progress, ResourceNeeds
from service.serving.devices.queue.memory import JobMemory

# Number of batches for which windows should be available: one is computed and the next is prepared, plus one in case
# preparation takes longer than computation.
BATCHES_AHEAD = 3
# A running job has priority over a waiting job only if its remaining work is less than this multiple of the other work.
REMAINING_WORK_FACTOR = 2


class JobQueue:
    """A queue that is fair to owners, prefers short jobs, and prevents starvation.

    Order: Owners take turns (round robin, Nagle 1987). The first job of every owner precedes the second job of any
    owner, where running jobs count as well. Within a turn, the job with the earliest deadline is first (Liu and Layland
    1973). The deadline of a job is its creation time plus its duration on an otherwise idle device. So a small job
    overtakes a large one that was queued shortly before. A large job can be overtaken only by jobs that are created
    within its own duration, which bounds its waiting time.

    Start: A job begins if fewer than `guaranteed_jobs` jobs are running, if the running jobs would soon leave the
    device idle, or if it will be done long before them. Enough memory must be free, unless no other job is running. A
    job that waits for memory can be overtaken by jobs that fit.

    Capacity: If owners share the queue, an owner may use at most as many places as it leaves free (dynamic thresholds,
    Choudhury and Hahne 1998). A single owner gets up to half of the places, two owners a third each, and there is
    always a place for another owner.

    limit            maximum number of waiting jobs, in addition to one that runs
    at_once          maximum number of running jobs
    memory           decides whether a job fits into memory
    shared           whether several owners share the queue
    guaranteed_jobs  number of jobs that may run regardless of the work that is left for the device
    """

    def __init__(
        self,
        limit: int,
        at_once: int = 16,
        memory: JobMemory | None = None,
        *,
        shared: bool = False,
        guaranteed_jobs: int = 1,
    ) -> None:
        self._limit, self._shared = limit, shared
        self.at_once, self._guaranteed_jobs = at_once, guaranteed_jobs
        self._memory = memory or JobMemory()
        self._durations = JobDurations()
        self._waiting: list[Job[Any]] = []
        self._running: dict[Job[Any], ResourceNeeds] = {}
        self._closed = False
        self._changed = threading.Condition()
        # Whether a thread was notified and has not searched for a job yet.
        self._notified = False

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Job[Any], ...]:
        """The running jobs."""
        with self._changed:
            return tuple(self._running)

    @property
    def jobs(self) -> tuple[Job[Any], ...]:
        """The running jobs, followed by the waiting jobs in their order."""
        with self._changed:
            return (*self._running, *self._waiting)

    def is_full(self, owner: str | None = None) -> bool:
        """Return whether the queue rejects further jobs of this owner."""
        with self._changed:
            jobs = self.jobs
            free = self._limit + 1 - len(jobs)
            return free <= (sum(job.owner == owner for job in jobs) if self._shared else 0)

    @property
    def expected_seconds(self) -> float:
        """Estimated device time of all waiting and running jobs in seconds."""
        with self._changed:
            return sum(self._durations.device_seconds(job) for job in self.jobs)

    def check(self, owner: str | None = None) -> None:
        """Raise the error that `offer` would raise now: NotReady, or QueueFull with the seconds until a retry."""
        with self._changed:
            if self._closed:
                raise NotReady("The service is stopping. Send the request again after it has restarted.")
            if self.is_full(owner):
                for_key = " for requests with this API key" if self._shared else ""
                message = f"The queue is full{for_key}: {len(self._waiting)} requests are waiting. Try again later."
                raise QueueFull(message, self._durations.retry_after(self._running))

    def offer(self, job: Job[Any]) -> None:
        """Add a job. Raises QueueFull or NotReady without blocking."""
        with self._changed:
            self.check(job.owner)
            self.put(job)
        job.add_done_callback(self._durations.record_duration)

    def put(self, job: Job[Any]) -> None:
        """Add a job even if the queue is full, such as a job that an earlier process accepted."""
        with self._changed:
            job.due = job.created + self._durations.device_seconds(job)
            job.on_advance, job.on_needs_changed = self._on_advance, self.update_needs
            self._waiting.append(job)
            self._sort()
            self._notify()
        job.add_done_callback(self._remove)

    def release(self, job: Job[Any]) -> None:
        """Mark a job as ready, so that it may begin."""
        with self._changed:
            job.ready = True
            self._notify()

    def take(self) -> Job[Any] | None:
        """Wait for the next job that may begin. Return None when the queue is closed and empty."""
        with self._changed:
            while not (self._closed and not self._waiting):
                self._notified = False
                if (job := self._next()) is not None:
                    self._waiting.remove(job)
                    self._running[job] = job.needs()
                    self._sort()
                    # Another job may begin in another thread, in addition to this one.
                    self._notify()
                    return job
                self._changed.wait()
            return None

    def update_needs(self, job: Job[Any], needs: ResourceNeeds) -> None:
        """Change the resources of a running job; do nothing for other jobs."""
        with self._changed:
            if job in self._running:
                self._running[job] = needs

    def close(self) -> None:
        """Stop accepting jobs. Waiting jobs still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Cancel all waiting and running jobs."""
        for job in self.jobs:
            job.cancel()

    def position(self, job: Job[Any]) -> int | None:
        """Return the position of a waiting job, starting at 1 for the next one; None for a job that is not waiting."""
        with self._changed:
            return self._waiting.index(job) + 1 if job in self._waiting else None

    def seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds until a job is done, including the jobs before it; None if unknown."""
        with self._changed:
            durations = self._durations
            finishing = durations.finishing_left(job)
            if job in self._running:
                left = durations.seconds_left(job)
                return None if left is None or finishing is None else left + finishing
            if job not in self._waiting:
                return None
            before = [durations.seconds_left(other) for other in self._waiting[: self._waiting.index(job) + 1]]
            # Running jobs share the device, so all of them are done when the longest one is done.
            running = [durations.seconds_left(other) for other in self._running]
        if None in before or None in running:
            return None
        return sum(filter(None, before)) + max(filter(None, running), default=0.0) + (finishing or 0.0)

    def expect(self, name: str, windows: int) -> float | None:
        """Estimate the seconds for a job with this number of windows; None if no job of the model has been timed."""
        with self._changed:
            return self._durations.expect(name, windows)

    def progress(self, job: Job[Any]) -> Progress:
        """Return the progress of a job in windows, where finishing counts as the equivalent number of windows."""
        return self._durations.progress(job)

    def _sort(self) -> None:
        """Order the waiting jobs by the turn of their owner, and within a turn by deadline."""
        if len(self._waiting) < 2:
            return
        turns = Counter(job.owner for job in self._running)
        order: dict[Job[Any], tuple[int, float]] = {}
        for job in sorted(self._waiting, key=lambda job: job.due):
            order[job] = turns[job.owner], job.due
            turns[job.owner] += 1
        self._waiting.sort(key=order.__getitem__)

    def _next(self) -> Job[Any] | None:
        """Return the next job if one may begin now, else None."""
        if len(self._running) >= self.at_once:
            return None
        blocked: ResourceNeeds | None = None
        blocked_owners = self._blocked_owners()
        for job in self._waiting:
            if job.ready and job.owner not in blocked_owners and self._is_useful(job, needs := job.needs()):
                if self._memory.fits(needs, blocked, self._running.values()):
                    return job
                blocked = blocked or needs
        return None

    def _blocked_owners(self) -> set[str | None]:
        """Return the owners whose jobs have to wait.

        The last slot for running jobs is reserved for an owner without a running job.
        """
        is_last_slot = self._shared and len(self._running) == self.at_once - 1
        return {job.owner for job in self._running} if is_last_slot else set()

    def _is_useful(self, job: Job[Any], needs: ResourceNeeds) -> bool:
        """Return whether windows of the job would be part of the next batches, after running jobs with less work."""
        if len(self._running) < self._guaranteed_jobs:
            return True
        durations = self._durations
        longest = REMAINING_WORK_FACTOR * durations.device_seconds(job)
        ahead = sum(left for left in map(durations.device_seconds, self._running) if left < longest)
        # Subtract half a window, so that rounding errors do not affect the result.
        return ahead < (BATCHES_AHEAD * needs.batch - 0.5) * durations.window_seconds(job)

    def _on_advance(self) -> None:
        """Notify a thread when a job progresses, because another job may be useful now."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        """Wake a thread in `take` if there is a job for it. Checking here is cheaper than waking a thread for nothing.

        A thread that was notified earlier will see all changes since then, and will notify the next thread.
        """
        if self._waiting and not self._notified and self._next() is not None:
            self._notified = True
            self._changed.notify()

    def _remove(self, job: Job[Any]) -> None:
        with self._changed:
            self._memory.invalidate()
            if self._running.pop(job, None) is None and job in self._waiting:
                self._waiting.remove(job)
            self._durations.learn(job)
            self._sort()
            # When a thread takes a job, it notifies the next thread. But all threads must see that the queue is closed.
            if self._closed:
                self._changed.notify_all()
            else:
                self._notify()
