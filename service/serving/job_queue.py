"""Job records, and the bounded queue in which they wait for their turn."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from service.core.errors import NotReady, QueueFull
from service.serving.job import Free, Job, Needs

RECENT = 16
LONGEST_RETRY_AFTER = 120
# Only puts jobs in order until the first one of a model has been timed; never told to anybody.
ASSUMED_SECONDS_PER_WINDOW = 0.1
# One batch is computed, the next is prepared already, and who knows whether those after it will be in time.
BATCHES_AHEAD = 3
# Work that is so much longer than another's can well wait until that one is done.
LONGER = 2


class JobQueue:
    """Short work first, yet nothing waits for ever. At most `limit` offered jobs are here beyond one that runs.

    Every job is due at the moment it came plus the seconds that it should take by itself, and the one that is due first
    is taken. So a small stack passes a huge one that has just come; and what may pass the huge one has to come within
    the time that the huge one takes, which bounds its waiting however many small ones follow. This is earliest deadline
    first (Liu and Layland 1973), the deadline being that of a device of one's own.

    Up to `at_once` jobs run, but no more than there is use for: one begins if those that run would let the device fall
    idle soon, or if it will be done long before they are. What they need has to fit in the memory that is `free`,
    unless nothing else runs; a job that has to wait for that is passed by those that fit in beside it. What is free may
    be `fresh_seconds` old: every job asks several times, and what was given out since counts as held.
    """

    def __init__(
        self, limit: int, at_once: int = 16, free: Callable[[], Free] = Free, fresh_seconds: float = 0.0
    ) -> None:
        self._limit = limit
        self._at_once = at_once
        self._ask, self._fresh_seconds = free, fresh_seconds
        # What was free, and when that was.
        self._found, self._looked = Free(), -math.inf
        self._waiting: list[Job[Any]] = []
        self._running: dict[Job[Any], Needs] = {}
        # What was free when nothing ran.
        self._capacity = Free()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._seconds_per_window: dict[str, float] = {}
        self._closed = False
        self._changed = threading.Condition()
        # Whether somebody was woken who has not looked yet.
        self._called = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> tuple[Job[Any], ...]:
        with self._changed:
            return tuple(self._running)

    @property
    def full(self) -> bool:
        """Whether no more may be offered."""
        return len(self._waiting) + len(self._running) > self._limit

    @property
    def expected(self) -> float:
        """Seconds of the device that those who wait and run should still take."""
        with self._changed:
            return sum(self._expected(job) for job in (*self._waiting, *self._running))

    def check(self) -> None:
        """Raise what `offer` would raise now: QueueFull with the seconds until a place is likely free, or NotReady."""
        with self._changed:
            if self._closed:
                raise NotReady("The service is stopping; send the request again when it is back.")
            if self.full:
                message = f"{len(self._waiting)} requests wait for the device, and no more may; try again later."
                raise QueueFull(message, self._retry_after())

    def offer(self, job: Job[Any]) -> None:
        """Let the job wait for its turn. Raises QueueFull or NotReady, at once."""
        with self._changed:
            self.check()
            self.put(job)
        job.when_over(self._learn)

    def put(self, job: Job[Any]) -> None:
        """Let the job wait for its turn, however many wait: for jobs of an earlier process."""
        with self._changed:
            job.due = job.created + self._expected(job)
            job.on_advance = self._look
            self._waiting.append(job)
            self._waiting.sort(key=lambda one: one.due)
            self._wake()
        job.when_over(self._forget)

    def release(self, job: Job[Any]) -> None:
        """The job's work can begin now."""
        with self._changed:
            job.ready = True
            self._wake()

    def take(self) -> Job[Any] | None:
        """Wait for the next job that may begin; None once the queue is closed and empty."""
        with self._changed:
            while not (self._closed and not self._waiting):
                self._called = False
                if (job := self._next()) is not None:
                    self._waiting.remove(job)
                    self._running[job] = job.needs()
                    # For whoever waits here as well: another one may begin beside this one.
                    self._wake()
                    return job
                self._changed.wait()
            return None

    def revise(self, job: Job[Any], needs: Needs) -> None:
        """What a job that runs needs after all; nothing where it does not run here."""
        with self._changed:
            if job in self._running:
                self._running[job] = needs

    def close(self) -> None:
        """Accept no more jobs; those that wait still get their turn."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Give up every job that waits or runs."""
        with self._changed:
            jobs = [*self._waiting, *self._running]
        for job in jobs:
            job.cancel()

    def position(self, job: Job[Any]) -> int | None:
        """1 for the job whose turn is next, and so on; None once it no longer waits."""
        with self._changed:
            return self._waiting.index(job) + 1 if job in self._waiting else None

    def seconds_left(self, job: Job[Any]) -> float | None:
        """Seconds until the job should be done, those before it included; None where that cannot be told yet."""
        with self._changed:
            if job in self._running:
                return self._left(job)
            if job not in self._waiting:
                return None
            before = [self._left(one) for one in self._waiting[: self._waiting.index(job) + 1]]
            # Those that run share the device, and each tells how long that takes as things are.
            beside = [self._left(one) for one in self._running]
        if None in before or None in beside:
            return None
        return sum(filter(None, before)) + max(filter(None, beside), default=0.0)

    def _left(self, job: Job[Any]) -> float | None:
        """Seconds until the work should be done, by its own pace or else by that of others with this model."""
        done, total = job.progress
        if done > 0:
            return job.seconds_run * (total - done) / done
        if job.windows and job.name in self._seconds_per_window:
            return max(job.windows * self._seconds_per_window[job.name] - job.seconds_run, 0.0)
        return None

    def _expected(self, job: Job[Any]) -> float:
        """Seconds of the device that are still to come."""
        done, total = job.progress
        return (total - done if total else job.windows) * self._rate(job)

    def _rate(self, job: Job[Any]) -> float:
        return self._seconds_per_window.get(job.name, ASSUMED_SECONDS_PER_WINDOW)

    def _next(self) -> Job[Any] | None:
        if len(self._running) >= self._at_once:
            return None
        blocked: Needs | None = None
        for job in self._waiting:
            if job.ready and self._useful(job, needs := job.needs()):
                if self._fits(needs, blocked):
                    return job
                blocked = blocked or needs
        return None

    def _useful(self, job: Job[Any], needs: Needs) -> bool:
        """Whether it would get windows into one of the next batches, those of the running with less work first."""
        longest, ahead = LONGER * self._expected(job), 0.0
        # Without generators: this is asked for every job that waits, whenever one gets on.
        for other in self._running:
            if (left := self._expected(other)) < longest:
                ahead += left
        # Half a window less, so that rounding decides nothing.
        return ahead < (BATCHES_AHEAD * needs.batch - 0.5) * self._rate(job)

    def _fits(self, needs: Needs, blocked: Needs | None) -> bool:
        """Whether there is memory for it, and still will be for the blocked one once the largest is gone."""
        free = self._free()
        if not self._running:
            self._capacity = free
            return True
        for kind, (now, capacity) in enumerate(zip(free, self._capacity, strict=True)):
            if now is None or capacity is None:
                continue
            need, held = needs[kind], [taken[kind] for taken in self._running.values()]
            # What runs may not have taken all of it yet, and others than this process may have.
            if need > now or need + sum(held) > capacity:
                return False
            if blocked is not None and need + blocked[kind] + sum(held) - max(held) > capacity:
                return False
        return True

    def _look(self) -> None:
        """Somebody got on, so that another one may be of use now."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        """One who waits in `take`, if there is a job for it: threads that look in vain cost more than to look here.

        Whoever was called before sees what has changed since, and wakes the next.
        """
        if self._waiting and not self._called and self._next() is not None:
            self._called = True
            self._changed.notify()

    def _free(self) -> Free:
        now = time.monotonic()
        if now - self._looked > self._fresh_seconds:
            self._found, self._looked = self._ask(), now
        return self._found

    def _forget(self, job: Job[Any]) -> None:
        with self._changed:
            # What it held is free now.
            self._looked = -math.inf
            if self._running.pop(job, None) is None and job in self._waiting:
                self._waiting.remove(job)
            if job.state == "done" and job.progress.total:
                self._time(job)
            # One is enough: who takes a job wakes the next. The end concerns all.
            if self._closed:
                self._changed.notify_all()
            else:
                self._wake()

    def _time(self, job: Job[Any]) -> None:
        measured = (job.device_seconds or job.seconds_run) / job.progress.total
        self._seconds_per_window[job.name] = (self._seconds_per_window.get(job.name, measured) + measured) / 2

    def _learn(self, job: Job[Any]) -> None:
        if job.state == "done":
            self._recent.append(job.seconds_run)

    def _retry_after(self) -> int:
        """Whole seconds until one that runs should end, by its own pace or else by the median of the recent ones."""
        known = [left for job in self._running if (left := self._left(job)) is not None]
        if known:
            left = min(known)
        elif self._recent:
            left = statistics.median(self._recent) - max((job.seconds_run for job in self._running), default=0.0)
        else:
            return 5
        return min(max(math.ceil(left), 1), LONGEST_RETRY_AFTER)
