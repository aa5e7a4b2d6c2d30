"""The bounded queue in which jobs wait for a device."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from service.core.errors import NotReady, QueueFull
from service.serving.devices.queue.durations import JobDurations
from service.serving.devices.queue.job import Job, Needs, Progress
from service.serving.devices.queue.memory import JobMemory

# One batch is computed and the next is prepared; a third in case preparing takes longer than computing.
BATCHES_AHEAD = 3
# A job that runs is ahead of one that waits only if its remaining work is less than this multiple of the other's.
REMAINING_WORK_FACTOR = 2


class JobQueue:
    """A queue in which owners take turns, short jobs come first, and no job waits for ever.

    The first job of every owner comes before the second of any, jobs that run included (round robin, Nagle 1987). In
    the same turn the job is taken that is due first: when it came plus the seconds that it takes by itself. So a small
    stack passes a huge one that has just come, and only jobs that come within the time that the huge one takes may pass
    it: this bounds its waiting, however many small ones follow. This is earliest deadline first (Liu and
    Layland 1973) with the deadline that a job would meet on a device of its own.

    A job begins if fewer run than always may, if those that run would let the device fall idle soon, or if it will be
    done long before them. Its memory has to be free, unless nothing else runs; a job that waits for memory is passed by
    those that fit in.

    Where owners share the queue, none takes more places than it leaves free (dynamic thresholds, Choudhury and Hahne
    1998): half of them for one owner who wants all, a third for each of two, and a place for who comes next.

    limit    how many jobs may wait beyond one that runs
    at_once  how many jobs may run
    memory   decides whether memory holds a job
    shared   whether several owners share the queue
    always   how many jobs may run regardless of the work that is left for the device
    """

    def __init__(
        self,
        limit: int,
        at_once: int = 16,
        memory: JobMemory | None = None,
        *,
        shared: bool = False,
        always: int = 1,
    ) -> None:
        self._limit, self._shared = limit, shared
        self.at_once, self._always = at_once, always
        self._memory = memory or JobMemory()
        self._durations = JobDurations()
        self._waiting: list[Job[Any]] = []
        self._running: dict[Job[Any], Needs] = {}
        self._closed = False
        self._changed = threading.Condition()
        # Whether a thread was notified that has not looked for a job since.
        self._notified = False

    @property
    def waiting(self) -> int:
        """The number of jobs that wait."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Job[Any], ...]:
        """The jobs that run."""
        with self._changed:
            return tuple(self._running)

    @property
    def jobs(self) -> tuple[Job[Any], ...]:
        """The jobs that run, then those that wait, in their turn."""
        with self._changed:
            return (*self._running, *self._waiting)

    def full(self, owner: str | None = None) -> bool:
        """Return whether this owner may offer no more jobs."""
        with self._changed:
            jobs = self.jobs
            left = self._limit + 1 - len(jobs)
            return left <= (sum(job.owner == owner for job in jobs) if self._shared else 0)

    @property
    def expected_seconds(self) -> float:
        """Seconds of the device that the jobs that wait and run should still take."""
        with self._changed:
            return sum(self._durations.device_seconds(job) for job in self.jobs)

    def check(self, owner: str | None = None) -> None:
        """Raise what `offer` would raise now: QueueFull with the seconds until a place is likely free, or NotReady."""
        with self._changed:
            if self._closed:
                raise NotReady("The service is stopping; send the request again when it is back.")
            if self.full(owner):
                of_key = " of this key" if self._shared else ""
                message = f"No more requests{of_key} may wait, with {len(self._waiting)} before them; try again later."
                raise QueueFull(message, self._durations.retry_after(self._running))

    def offer(self, job: Job[Any]) -> None:
        """Add a job. Raises QueueFull or NotReady, at once."""
        with self._changed:
            self.check(job.owner)
            self.put(job)
        job.add_done_callback(self._durations.record_duration)

    def put(self, job: Job[Any]) -> None:
        """Add a job, however many wait: for jobs of an earlier process."""
        with self._changed:
            job.due = job.created + self._durations.device_seconds(job)
            job.on_advance, job.on_revise = self._on_advance, self.revise
            self._waiting.append(job)
            self._sort()
            self._notify()
        job.add_done_callback(self._remove)

    def release(self, job: Job[Any]) -> None:
        """Let a job begin that was not ready."""
        with self._changed:
            job.ready = True
            self._notify()

    def take(self) -> Job[Any] | None:
        """Wait for the next job that may begin; None once the queue is closed and empty."""
        with self._changed:
            while not (self._closed and not self._waiting):
                self._notified = False
                if (job := self._next()) is not None:
                    self._waiting.remove(job)
                    self._running[job] = job.needs()
                    self._sort()
                    # Another job may begin beside this one, in another thread.
                    self._notify()
                    return job
                self._changed.wait()
            return None

    def revise(self, job: Job[Any], needs: Needs) -> None:
        """Change the resources of a job that runs; do nothing for any other."""
        with self._changed:
            if job in self._running:
                self._running[job] = needs

    def close(self) -> None:
        """Accept no more jobs; those that wait still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Cancel every job that waits or runs."""
        for job in self.jobs:
            job.cancel()

    def position(self, job: Job[Any]) -> int | None:
        """Return 1 for the job whose turn is next, and so on; None for a job that does not wait."""
        with self._changed:
            return self._waiting.index(job) + 1 if job in self._waiting else None

    def seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds until the job is done, those before it included; None if unknown."""
        with self._changed:
            durations = self._durations
            finishing = durations.finishing_left(job)
            if job in self._running:
                left = durations.seconds_left(job)
                return None if left is None or finishing is None else left + finishing
            if job not in self._waiting:
                return None
            before = [durations.seconds_left(other) for other in self._waiting[: self._waiting.index(job) + 1]]
            # Jobs that run share the device, so that they take as long as the longest of them.
            beside = [durations.seconds_left(other) for other in self._running]
        if None in before or None in beside:
            return None
        return sum(filter(None, before)) + max(filter(None, beside), default=0.0) + (finishing or 0.0)

    def expect(self, name: str, windows: int) -> float | None:
        """Estimate the seconds that windows of a model take, with decoding; None before one was timed."""
        with self._changed:
            return self._durations.expect(name, windows)

    def progress(self, job: Job[Any]) -> Progress:
        """Return the progress of a job in windows: decoding counts as many as are computed in its time."""
        return self._durations.progress(job)

    def _sort(self) -> None:
        """Order the waiting jobs by turns of their owners, and those with the same turn by when they are due."""
        if len(self._waiting) < 2:
            return
        turns = Counter(job.owner for job in self._running)
        order: dict[Job[Any], tuple[int, float]] = {}
        for job in sorted(self._waiting, key=lambda job: job.due):
            order[job] = turns[job.owner], job.due
            turns[job.owner] += 1
        self._waiting.sort(key=order.__getitem__)

    def _next(self) -> Job[Any] | None:
        """Return the job that begins next, if one may begin now."""
        if len(self._running) >= self.at_once:
            return None
        blocked: Needs | None = None
        to_wait = self._owners_to_wait()
        for job in self._waiting:
            if job.ready and job.owner not in to_wait and self._is_useful(job, needs := job.needs()):
                if self._memory.fits(needs, blocked, self._running.values()):
                    return job
                blocked = blocked or needs
        return None

    def _owners_to_wait(self) -> set[str | None]:
        """Return the owners whose jobs have to wait: the last place among running jobs is for an owner who has none."""
        last = self._shared and len(self._running) == self.at_once - 1
        return {job.owner for job in self._running} if last else set()

    def _is_useful(self, job: Job[Any], needs: Needs) -> bool:
        """Return whether the job's windows would be in one of the next batches, after running jobs with less work."""
        if len(self._running) < self._always:
            return True
        durations = self._durations
        longest = REMAINING_WORK_FACTOR * durations.device_seconds(job)
        ahead = sum(left for left in map(durations.device_seconds, self._running) if left < longest)
        # Half a window less, so that rounding decides nothing.
        return ahead < (BATCHES_AHEAD * needs.batch - 0.5) * durations.window_seconds(job)

    def _on_advance(self) -> None:
        """Notify: a job got further, so that another one may be useful now."""
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        """Wake one thread in `take` if there is a job for it: waking it in vain costs more than to look here.

        A thread that was notified before sees all changes since, and notifies the next one.
        """
        if self._waiting and not self._notified and self._next() is not None:
            self._notified = True
            self._changed.notify()

    def _remove(self, job: Job[Any]) -> None:
        with self._changed:
            self._memory.expire()
            if self._running.pop(job, None) is None and job in self._waiting:
                self._waiting.remove(job)
            self._durations.learn(job)
            self._sort()
            # A thread that takes a job notifies the next, but every thread has to see the end.
            if self._closed:
                self._changed.notify_all()
            else:
                self._notify()
