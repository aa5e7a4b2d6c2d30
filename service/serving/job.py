"""One piece of work for a device, and its one result."""

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
    """How many steps of the work (windows) are done, of how many; 0 of 0 before that is known."""

    done: int = 0
    total: int = 0


class Needs(NamedTuple):
    """What a piece of work takes: bytes of memory at its peak, and windows at once, of whomever they are."""

    host: int = 0
    device: int = 0
    batch: int = 1


class Free(NamedTuple):
    """Bytes of memory that can still be taken, None where nobody says."""

    host: int | None = None
    device: int | None = None


class Job(Generic[T]):
    """One piece of work for the device, and its one result.

    Work, result and error hold volumes and labels. Nothing here refers back to itself, so that they leave memory with
    the last one who knows the job: Python seldom looks for cycles among all the objects that torch brings along.

    name     of the model; jobs of one name are expected to take equally long per window
    work     called with the job itself in the worker's thread: it asks `job.cancelled()` now and then, tells
             `job.advance(done, total)`, and returns the result of `future` or raises what the future then raises
    windows  how many there should be; 0: not known, the job counts as short
    needs    called when the work could begin: what it will take
    ready    whether the work can begin; if not, the job keeps its place until `JobQueue.release`
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job[T]], T],
        *,
        windows: int = 0,
        needs: Callable[[], Needs] = Needs,
        ready: bool = True,
    ) -> None:
        self.name = name
        self.windows = windows
        self.needs = needs
        self.ready = ready
        # On the clock of `time.monotonic`; see `JobQueue`.
        self.due = 0.0
        # That the device was busy for it; 0 where nobody tells.
        self.device_seconds = 0.0
        self.on_advance: Callable[[], None] = lambda: None
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
        if self.future.cancel():
            self._let_go()

    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def advance(self, done: int, total: int) -> None:
        self.progress = Progress(done, total)
        self.on_advance()

    def run(self) -> None:
        """Do the work, unless it was cancelled while it waited. What the work raises passes through: see `fail`."""
        if not self.future.set_running_or_notify_cancel():
            return
        self._started = time.monotonic()
        try:
            result = self._work(self)
        finally:
            self._let_go()
        self._ended = time.monotonic()
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End with `error`, in the thread that called `run`."""
        self._ended = time.monotonic()
        if isinstance(error, StackSegError):
            # Its words say it all; its traceback holds everything that was computed with.
            _forget_traceback(error)
        self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        """End with `error` before it was ever ready, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self._let_go()
            self.fail(error)

    def _let_go(self) -> None:
        """Of what the work was to be done with."""
        self._work, self.needs = _done, Needs

    def when_over(self, call: Callable[[Job[T]], None]) -> None:
        """Call with the job itself once it is over, in the thread that ended it; the job does not hold itself so."""
        known = weakref.ref(self)

        def over(_future: Future[T]) -> None:
            job = known()
            if job is not None:
                call(job)

        self.future.add_done_callback(over)


def _done(_job: Job[Any]) -> NoReturn:
    """Stands for work that is over."""
    raise AssertionError("a job runs once")


def _forget_traceback(error: BaseException) -> None:
    """Of the error and of those that it came from."""
    links: list[BaseException | None] = [error]
    while links:
        if (link := links.pop()) is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
