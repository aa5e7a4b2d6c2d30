"""Job records, and the bounded queue in which they wait for the device."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from service.errors import NotReady, QueueFull

T = TypeVar("T")

State = Literal["waiting", "running", "done", "failed", "cancelled"]
RECENT = 16
LONGEST_RETRY_AFTER = 120
# Only puts jobs in order until the first one of a model has been timed; never told to anybody.
ASSUMED_SECONDS_PER_WINDOW = 0.1


class Progress(NamedTuple):
    """How many steps of the work (windows) are done, of how many; 0 of 0 before that is known."""

    done: int = 0
    total: int = 0


class Job(Generic[T]):
    """One piece of work for the device, and its one result.

    name     of the model; jobs of one name are expected to take equally long per window
    work     called with the job itself in the worker's thread: it asks `job.cancelled()` now and then, tells
             `job.advance(done, total)`, and returns the result of `future` or raises what the future then raises
    windows  how many there should be; 0: not known, the job counts as short
    ready    whether the work can begin; if not, the job keeps its place until `JobQueue.release`
    """

    def __init__(self, name: str, work: Callable[[Job[T]], T], *, windows: int = 0, ready: bool = True) -> None:
        self.name = name
        self.windows = windows
        self.ready = ready
        self.future: Future[T] = Future()
        self.progress = Progress()
        self.created = time.monotonic()
        self._work = work
        self._cancel = threading.Event()
        self._started: float | None = None
        self._ended: float | None = None

    @property
    def state(self) -> State:
        if self.future.cancelled():
            return "cancelled"
        if not self.future.done():
            return "running" if self.future.running() else "waiting"
        if self.future.exception() is None:
            return "done"
        return "cancelled" if self._cancel.is_set() else "failed"

    @property
    def seconds_waited(self) -> float:
        """Seconds between creation and the start of the work, or until now."""
        return (self._started if self._started is not None else time.monotonic()) - self.created

    @property
    def seconds_run(self) -> float:
        """Seconds between the start of the work and its end, or until now; 0 while it waits."""
        if self._started is None:
            return 0.0
        return (self._ended if self._ended is not None else time.monotonic()) - self._started

    def cancel(self) -> None:
        """Give the work up: at once while it waits, else as soon as it asks."""
        self._cancel.set()
        self.future.cancel()

    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def advance(self, done: int, total: int) -> None:
        self.progress = Progress(done, total)

    def run(self) -> None:
        """Do the work, unless it was cancelled while it waited. What the work raises passes through: see `fail`."""
        if not self.future.set_running_or_notify_cancel():
            return
        self._started = time.monotonic()
        result = self._work(self)
        self._ended = time.monotonic()
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End with `error`, in the thread that called `run`."""
        self._ended = time.monotonic()
        self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        """End with `error` before it was ever ready, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.fail(error)


class JobQueue:
    """Short work first, yet nothing waits for ever. At most `limit` offered jobs wait beyond the one that runs.

    Every job is due at the moment it came plus the seconds that it should take by itself, and the one that is due first
    is taken. So a small stack passes a huge one that has just come; and what may pass the huge one has to come within
    the time that the huge one takes, which bounds its waiting however many small ones follow. This is earliest deadline
    first (Liu and Layland 1973), the deadline being that of a device of one's own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Job[Any]] = []
        self._due: dict[Job[Any], float] = {}
        self._running: Job[Any] | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._seconds_per_window: dict[str, float] = {}
        self._closed = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Job[Any] | None:
        return self._running

    def check(self) -> None:
        """Raise what `offer` would raise now: QueueFull with the seconds until a place is likely free, or NotReady."""
        with self._changed:
            if self._closed:
                raise NotReady("The service is stopping; send the request again when it is back.")
            if len(self._waiting) + (self._running is not None) > self._limit:
                message = f"{len(self._waiting)} requests wait for the device, and no more may; try again later."
                raise QueueFull(message, self._retry_after())

    def offer(self, job: Job[Any]) -> None:
        """Let the job wait for its turn. Raises QueueFull or NotReady, at once."""
        with self._changed:
            self.check()
            self.put(job)
        job.future.add_done_callback(lambda _: self._learn(job))

    def put(self, job: Job[Any]) -> None:
        """Let the job wait for its turn, however many wait: for loading models, and for jobs of an earlier process."""
        with self._changed:
            rate = self._seconds_per_window.get(job.name, ASSUMED_SECONDS_PER_WINDOW)
            self._due[job] = job.created + job.windows * rate
            self._waiting.append(job)
            self._waiting.sort(key=self._due.__getitem__)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(job))

    def release(self, job: Job[Any]) -> None:
        """The job's work can begin now."""
        with self._changed:
            job.ready = True
            self._changed.notify()

    def take(self) -> Job[Any] | None:
        """Wait for the next job; None once the queue is closed and empty."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._next() is not None or (self._closed and not self._waiting))
            job = self._next()
            if job is not None:
                self._remove(job)
                self._running = job
            return job

    def close(self) -> None:
        """Accept no more jobs; those that wait still get their turn."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Give up every job that waits or runs."""
        with self._changed:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            job.cancel()

    def position(self, job: Job[Any]) -> int | None:
        """1 for the job whose turn is next, and so on; None once it no longer waits."""
        with self._changed:
            return self._waiting.index(job) + 1 if job in self._waiting else None

    def seconds_left(self, job: Job[Any]) -> float | None:
        """Seconds until the job should be done, those before it included; None where that cannot be told yet."""
        with self._changed:
            if job is self._running:
                return self._left(job)
            if job not in self._waiting:
                return None
            before = self._waiting[: self._waiting.index(job) + 1]
            parts = [self._left(one) for one in ([self._running] if self._running else []) + before]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def _left(self, job: Job[Any]) -> float | None:
        done, total = job.progress
        if done > 0:
            return job.seconds_run * (total - done) / done
        if job.windows and job.name in self._seconds_per_window:
            return max(job.windows * self._seconds_per_window[job.name] - job.seconds_run, 0.0)
        return None

    def _next(self) -> Job[Any] | None:
        return next((job for job in self._waiting if job.ready), None)

    def _remove(self, job: Job[Any]) -> None:
        self._waiting.remove(job)
        del self._due[job]

    def _forget(self, job: Job[Any]) -> None:
        with self._changed:
            if job is self._running:
                self._running = None
            elif job in self._waiting:
                self._remove(job)
                self._changed.notify_all()
            if job.state == "done" and job.progress.total:
                self._time(job)

    def _time(self, job: Job[Any]) -> None:
        measured = job.seconds_run / job.progress.total
        self._seconds_per_window[job.name] = (self._seconds_per_window.get(job.name, measured) + measured) / 2

    def _learn(self, job: Job[Any]) -> None:
        if job.state == "done":
            self._recent.append(job.seconds_run)

    def _retry_after(self) -> int:
        """Whole seconds until the running job should end, by its own pace or else by the median of the recent ones."""
        left = self._left(self._running) if self._running is not None else None
        if left is None:
            if not self._recent:
                return 5
            run = self._running.seconds_run if self._running is not None else 0.0
            left = statistics.median(self._recent) - run
        return min(max(math.ceil(left), 1), LONGEST_RETRY_AFTER)
