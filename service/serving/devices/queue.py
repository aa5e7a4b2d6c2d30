"""The bounded queue in which jobs wait for a device, and the threads in which they run."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from service.core.errors import NotReady, QueueFull, StackSegError
from service.inference.runner.memory_errors import translate_error
from service.serving.devices.job import FreeMemory, Job, Needs, Progress

RECENT_JOBS = 16
MAX_RETRY_AFTER = 120
# Only orders jobs until the first one of a model has been timed; callers never see it.
ASSUMED_SECONDS_PER_WINDOW = 0.1
# One batch is computed and the next is prepared; a third in case preparing takes longer than computing.
BATCHES_AHEAD = 3
# What decoding takes after the last window, as a share of the time for windows: until a job of the model has told it,
# and the seconds from which on a job tells it.
ASSUMED_FINISHING = 0.1
LEAST_FINISHING_SECONDS = 0.1
# A job that runs is ahead of one that waits only if it has less work left than so many times the other's.
LONGER = 2

log = logging.getLogger(__name__)


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

    limit          how many jobs may wait beyond one that runs
    shared         whether several owners share the queue
    at_once        how many jobs may run
    always         how many jobs may run regardless of the work that is left for the device
    free           returns the memory that is free; it must not raise, or jobs would wait for ever
    fresh_seconds  how old that may be: every job asks several times, and memory given out since counts as used
    """

    def __init__(  # noqa: PLR0913
        self,
        limit: int,
        at_once: int = 16,
        free: Callable[[], FreeMemory] = FreeMemory,
        fresh_seconds: float = 0.0,
        *,
        shared: bool = False,
        always: int = 1,
    ) -> None:
        self._limit, self._shared = limit, shared
        self._at_once, self._always = at_once, always
        self._ask_free, self._fresh_seconds = free, fresh_seconds
        self._free, self._free_asked = FreeMemory(), -math.inf
        self._waiting: list[Job[Any]] = []
        self._running: dict[Job[Any], Needs] = {}
        # What was free when nothing ran.
        self._capacity = FreeMemory()
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_JOBS)
        self._seconds_per_window: dict[str, float] = {}
        self._finishing: dict[str, float] = {}
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
            return sum(self._expected_seconds(job) for job in self.jobs)

    def check(self, owner: str | None = None) -> None:
        """Raise what `offer` would raise now: QueueFull with the seconds until a place is likely free, or NotReady."""
        with self._changed:
            if self._closed:
                raise NotReady("The service is stopping; send the request again when it is back.")
            if self.full(owner):
                of_key = " of this key" if self._shared else ""
                message = f"No more requests{of_key} may wait, with {len(self._waiting)} before them; try again later."
                raise QueueFull(message, self._retry_after())

    def offer(self, job: Job[Any]) -> None:
        """Add a job. Raises QueueFull or NotReady, at once."""
        with self._changed:
            self.check(job.owner)
            self.put(job)
        job.add_done_callback(self._record_duration)

    def put(self, job: Job[Any]) -> None:
        """Add a job, however many wait: for jobs of an earlier process."""
        with self._changed:
            job.due = job.created + self._expected_seconds(job)
            job.on_advance = self._on_advance
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
            finishing = self._finishing_left(job)
            if job in self._running:
                left = self._seconds_left(job)
                return None if left is None or finishing is None else left + finishing
            if job not in self._waiting:
                return None
            before = [self._seconds_left(other) for other in self._waiting[: self._waiting.index(job) + 1]]
            # Jobs that run share the device, so that they take as long as the longest of them.
            beside = [self._seconds_left(other) for other in self._running]
        if None in before or None in beside:
            return None
        return sum(filter(None, before)) + max(filter(None, beside), default=0.0) + (finishing or 0.0)

    def expect(self, name: str, windows: int) -> float | None:
        """Estimate the seconds that so many windows of a model take, with decoding; None before one was timed."""
        with self._changed:
            if name not in self._seconds_per_window:
                return None
            return windows * self._seconds_per_window[name] * (1 + self._finishing.get(name, 0.0))

    def progress(self, job: Job[Any]) -> Progress:
        """Return what is done of a job, in windows: decoding counts as many as are computed in its time."""
        done, total = job.progress if job.progress.total else Progress(0, job.windows)
        share = self._finishing.get(job.name, ASSUMED_FINISHING)
        finishing = max(math.ceil(share * total), 1)
        if (elapsed := job.seconds_finishing) > 0:
            expected = share * (job.seconds_run - elapsed)
            done += int(min(finishing * elapsed / max(expected, elapsed), finishing - 1))
        return Progress(done, total + finishing)

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

    def _seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds of one job, from its own progress or else from earlier jobs with its model."""
        done, total = job.progress
        if done > 0:
            return job.seconds_run * (total - done) / done
        if job.windows and job.name in self._seconds_per_window:
            return max(job.windows * self._seconds_per_window[job.name] - job.seconds_run, 0.0)
        return None

    def _finishing_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds of one job after its last window; None where it is at that and takes unusually long."""
        share, elapsed = self._finishing.get(job.name), job.seconds_finishing
        if elapsed > 0:
            left = (share or 0.0) * (job.seconds_run - elapsed) - elapsed
            return left if left > 0 else None
        done, total = job.progress
        windows = job.seconds_run * total / done if done else job.windows * self._window_seconds(job)
        return (share or 0.0) * windows

    def _expected_seconds(self, job: Job[Any]) -> float:
        """Estimate the seconds of the device that the job still takes."""
        done, total = job.progress
        return (total - done if total else job.windows) * self._window_seconds(job)

    def _window_seconds(self, job: Job[Any]) -> float:
        return self._seconds_per_window.get(job.name, ASSUMED_SECONDS_PER_WINDOW)

    def _next(self) -> Job[Any] | None:
        """Return the job that begins next, if one may begin now."""
        if len(self._running) >= self._at_once:
            return None
        blocked: Needs | None = None
        to_wait = self._owners_to_wait()
        for job in self._waiting:
            if job.ready and job.owner not in to_wait and self._is_useful(job, needs := job.needs()):
                if self._fits(needs, blocked):
                    return job
                blocked = blocked or needs
        return None

    def _owners_to_wait(self) -> set[str | None]:
        """Return the owners whose jobs have to wait: the last place among running jobs is for an owner who has none."""
        last = self._shared and len(self._running) == self._at_once - 1
        return {job.owner for job in self._running} if last else set()

    def _is_useful(self, job: Job[Any], needs: Needs) -> bool:
        """Return whether the job's windows would be in one of the next batches, after running jobs with less work."""
        if len(self._running) < self._always:
            return True
        longest, ahead = LONGER * self._expected_seconds(job), 0.0
        # No generator expression: this runs for every waiting job whenever a job advances.
        for other in self._running:
            if (left := self._expected_seconds(other)) < longest:
                ahead += left
        # Half a window less, so that rounding decides nothing.
        return ahead < (BATCHES_AHEAD * needs.batch - 0.5) * self._window_seconds(job)

    def _fits(self, needs: Needs, blocked: Needs | None) -> bool:
        """Return whether memory holds the job now, and the blocked job as well once the largest one is over."""
        free = self._free_memory()
        if not self._running:
            self._capacity = free
            return True
        for kind, (now, capacity) in enumerate(zip(free, self._capacity, strict=True)):
            if now is None or capacity is None:
                continue
            need, held = needs[kind], [taken[kind] for taken in self._running.values()]
            # Running jobs may not have taken all of their memory yet, and other processes may have taken some.
            if need > now or need + sum(held) > capacity:
                return False
            if blocked is not None and need + blocked[kind] + sum(held) - max(held) > capacity:
                return False
        return True

    def _free_memory(self) -> FreeMemory:
        now = time.monotonic()
        if now - self._free_asked > self._fresh_seconds:
            self._free, self._free_asked = self._ask_free(), now
        return self._free

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
            # The job's memory is free now.
            self._free_asked = -math.inf
            if self._running.pop(job, None) is None and job in self._waiting:
                self._waiting.remove(job)
            if job.state == "done" and job.progress.total:
                measured = (job.device_seconds or job.seconds_run) / job.progress.total
                self._seconds_per_window[job.name] = (self._seconds_per_window.get(job.name, measured) + measured) / 2
            # Of a series it is that of the last time point alone.
            if job.state == "done" and not job.points.total and job.seconds_finishing > LEAST_FINISHING_SECONDS:
                share = job.seconds_finishing / (job.seconds_run - job.seconds_finishing)
                self._finishing[job.name] = (self._finishing.get(job.name, share) + share) / 2
            self._sort()
            # A thread that takes a job notifies the next, but every thread has to see the end.
            if self._closed:
                self._changed.notify_all()
            else:
                self._notify()

    def _record_duration(self, job: Job[Any]) -> None:
        if job.state == "done":
            self._recent_seconds.append(job.seconds_run)

    def _retry_after(self) -> int:
        """Estimate the whole seconds until a job ends, from its progress or else from the median of recent jobs."""
        known = [left for job in self._running if (left := self._seconds_left(job)) is not None]
        if known:
            left = min(known)
        elif self._recent_seconds:
            longest = max((job.seconds_run for job in self._running), default=0.0)
            left = statistics.median(self._recent_seconds) - longest
        else:
            return 5
        return min(max(math.ceil(left), 1), MAX_RETRY_AFTER)


class JobThreads:
    """Threads that run jobs, one after the other, until `take` returns None. A failed job ends no thread.

    begin  runs first in each thread
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Job[Any] | None],
        threads: int = 1,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._take, self._begin = take, begin
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(threads)]

    @property
    def alive(self) -> bool:
        """Whether any thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until every thread has ended; return False if one has not after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not self.alive

    def _loop(self) -> None:
        self._begin()
        while (job := self._take()) is not None:
            try:
                job.run()
            except StackSegError as error:
                job.fail(error)
            except Exception as error:
                known = translate_error(error)
                if known is error:
                    log.exception("unexpected failure of a request")
                job.fail(known)
            del job  # holds the volume and the labels, and the next job may be hours away
