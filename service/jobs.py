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


class Progress(NamedTuple):
    """How many steps of the work (windows) are done, of how many; 0 of 0 before that is known."""

    done: int = 0
    total: int = 0


class Job(Generic[T]):
    """One piece of work for the device, and its one result.

    `work` is called with the job itself in the worker's thread: it asks `job.cancelled()` now and then, tells
    `job.advance(done, total)`, and returns the result of `future` or raises what the future then raises.
    """

    def __init__(self, name: str, work: Callable[[Job[T]], T]) -> None:
        self.name = name
        self.future: Future[T] = Future()
        self.progress = Progress()
        self._work = work
        self._cancel = threading.Event()
        self._created = time.monotonic()
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
        return (self._started if self._started is not None else time.monotonic()) - self._created

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

    def fail(self, error: Exception) -> None:
        """End with `error`, in the thread that called `run`."""
        self._ended = time.monotonic()
        self.future.set_exception(error)


class JobQueue:
    """First come, first served. At most `limit` offered jobs wait beyond the one that runs."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Job[Any]] = deque()
        self._running: Job[Any] | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
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
        """Let the job wait for its turn, however many wait: for the service's own work, loading models."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(job))

    def take(self) -> Job[Any] | None:
        """Wait for the next job; None once the queue is closed and empty."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

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

    def _forget(self, job: Job[Any]) -> None:
        with self._changed:
            if job is self._running:
                self._running = None
            elif job in self._waiting:
                self._waiting.remove(job)

    def _learn(self, job: Job[Any]) -> None:
        if job.state == "done":
            self._recent.append(job.seconds_run)

    def _retry_after(self) -> int:
        """Whole seconds until the running job should end, judged by the median of the recent ones."""
        if not self._recent:
            return 5
        run = self._running.seconds_run if self._running is not None else 0.0
        return min(max(math.ceil(statistics.median(self._recent) - run), 1), LONGEST_RETRY_AFTER)
