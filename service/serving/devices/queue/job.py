"""A piece of work for a device, its state and its result."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

from service.core.errors import StackSegError

T = TypeVar("T")

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class Progress(NamedTuple):
    """The number of windows that are done, and of all; 0 of 0 before that is known."""

    done: int = 0
    total: int = 0


class Needs(NamedTuple):
    """The resources of a job: peak bytes of host and device memory, and windows per batch."""

    host: int = 0
    device: int = 0
    batch: int = 1


class FreeMemory(NamedTuple):
    """Free bytes of host and device memory; None if unknown."""

    host: int | None = None
    device: int | None = None


class Job(Generic[T]):
    """A piece of work for a device, and its one result.

    Work, result and error hold volumes and labels. A job does not refer to itself, so that they are freed with the last
    reference to it: Python seldom searches the many objects of torch for cycles.

    name     of the model; jobs of one name are expected to take equally long per window
    work     runs in a thread of the queue with the job as its argument. It asks `job.cancelled()` now and then, calls
             `job.advance(done, total)`, and returns the result of `future` or raises its exception
    windows  estimated number; 0 if unknown, which counts as short
    needs    returns the resources, and is called when the work could begin
    ready    whether the work can begin; a job that is not ready keeps its place until `JobQueue.release`
    owner    name of the API key, among which `JobQueue` is fair; None where nobody in particular asked
    clock    returns seconds, as `time.monotonic` does
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        work: Callable[[Job[T]], T],
        *,
        windows: int = 0,
        needs: Callable[[], Needs] = Needs,
        ready: bool = True,
        owner: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._clock = clock
        self.owner = owner
        self.windows = windows
        self.needs = needs
        self.ready = ready
        # When `JobQueue` should have run it, by its clock.
        self.due = 0.0
        # How long the device was busy with it, and its share of the windows that batches had room for; 0 if unknown.
        self.device_seconds = self.device_slots = 0.0
        # Set by the queue, which decides anew which job begins next.
        self.on_advance: Callable[[], None] = lambda: None
        self.on_revise: Callable[[Job[T], Needs], None] = lambda _job, _needs: None
        self.future: Future[T] = Future()
        self.progress = Progress()
        # Time points that are done, of a series.
        self.points = Progress()
        self.created = self._clock()
        self._work = work
        self._cancel = threading.Event()
        self._started: float | None = None
        self._windows_done: float | None = None
        self._ended: float | None = None

    @property
    def state(self) -> State:
        """The state: waiting or running, or how the job ended."""
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
        return (self._started if self._started is not None else self._clock()) - self.created

    @property
    def seconds_run(self) -> float:
        """Seconds between the start of the work and its end, or until now; 0 while it waits."""
        return self._seconds_since(self._started)

    @property
    def seconds_finishing(self) -> float:
        """Seconds between the last window and the end of the work, or until now; 0 while windows are left."""
        return self._seconds_since(self._windows_done)

    def _seconds_since(self, began: float | None) -> float:
        if began is None:
            return 0.0
        return (self._ended if self._ended is not None else self._clock()) - began

    def cancel(self) -> None:
        """Cancel at once while the job waits, else as soon as its work asks."""
        self._cancel.set()
        if self.future.cancel():
            self._drop_work()

    def cancelled(self) -> bool:
        """Return whether the job was cancelled; its work may still run."""
        return self._cancel.is_set()

    def advance(self, done: int, total: int) -> None:
        """Record how many windows are done."""
        # The time comes first: whoever sees that all are done finds it.
        self._windows_done = self._clock() if done == total else None
        self.progress = Progress(done, total)
        self.on_advance()

    def revise(self, needs: Needs) -> None:
        """Tell the queue that the work takes other resources than `needs` returned."""
        self.on_revise(self, needs)

    def run(self) -> None:
        """Do the work, unless the job was cancelled while it waited. The caller passes exceptions on to `fail`."""
        if not self.future.set_running_or_notify_cancel():
            return
        self._started = self._clock()
        try:
            result = self._work(self)
        finally:
            self._drop_work()
        self._ended = self._clock()
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End with an error, in the thread that called `run`."""
        self._ended = self._clock()
        if isinstance(error, StackSegError):
            # The message says enough, and the traceback would keep volumes in memory.
            _drop_tracebacks(error)
        self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        """End with an error before the job was ready, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self._drop_work()
            self.fail(error)

    def add_done_callback(self, call: Callable[[Job[T]], None]) -> None:
        """Call with the job once it is over, in the thread that ended it. A weak reference avoids a cycle."""
        reference = weakref.ref(self)

        def over(_future: Future[T]) -> None:
            job = reference()
            if job is not None:
                call(job)

        self.future.add_done_callback(over)

    def _drop_work(self) -> None:
        """Free all that the work holds."""
        self._work, self.needs = _run_twice, Needs


def _run_twice(_job: Job[Any]) -> NoReturn:
    raise AssertionError("a job runs once")


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error, its causes and contexts."""
    links: list[BaseException | None] = [error]
    while links:
        if (link := links.pop()) is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
