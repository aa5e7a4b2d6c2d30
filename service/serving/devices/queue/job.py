"""A job: work for a device, with its state, progress and result."""

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
    """Number of completed items, such as windows, and total number of items; both are 0 until the total is known."""

    done: int = 0
    total: int = 0


class ResourceNeeds(NamedTuple):
    """Resources that a job needs: peak host and device memory in bytes, and windows per batch."""

    host_bytes: int = 0
    device_bytes: int = 0
    batch_size: int = 1


class FreeMemory(NamedTuple):
    """Free host and device memory in bytes; None if unknown."""

    host_bytes: int | None = None
    device_bytes: int | None = None


class Job(Generic[T]):
    """Work that runs once on a device, and its result.

    The work, its result and its errors refer to volumes and labels. A job has no reference cycles, so the volumes and
    labels are freed with the last reference to the job. Python's cycle collector would free them much later, because it
    seldom searches the many objects that PyTorch creates.

    model_name    name of the model; all jobs of a model are expected to take the same time per window
    work          function that runs in a thread of the queue, with the job as its argument. It polls `job.cancelled()`,
                  calls `job.advance(done, total)`, and returns the result or raises the exception for `future`
    window_count  estimated number of windows; 0 if unknown, in which case the queue treats the job as short
    needs         returns the required resources; called whenever the work could start
    is_ready      whether the work can start; a job that is not ready keeps its place in the queue until
                  `JobQueue.mark_ready` is called
    owner         name of the API key, for fair scheduling; None for anonymous jobs
    clock         returns the time in seconds, like `time.monotonic`
    """

    def __init__(  # noqa: PLR0913
        self,
        model_name: str,
        work: Callable[[Job[T]], T],
        *,
        window_count: int = 0,
        needs: Callable[[], ResourceNeeds] = ResourceNeeds,
        is_ready: bool = True,
        owner: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self.clock = clock
        self.owner = owner
        self.window_count = window_count
        self.needs = needs
        self.is_ready = is_ready
        # Deadline that `JobQueue` assigns, on the clock of the job.
        self.deadline = 0.0
        # Device time in seconds, and number of batch slots that the job has used; 0 if unknown.
        self.device_seconds = self.device_slots = 0.0
        # Value of the queue's clock of shared seconds at the start of the job.
        self.shared_start_seconds = 0.0
        # Set by the queue, which may start another job when this one progresses.
        self.on_advance: Callable[[], None] = lambda: None
        self.on_needs_changed: Callable[[Job[T], ResourceNeeds], None] = lambda _job, _needs: None
        self.future: Future[T] = Future()
        self.progress = Progress()
        # Number of completed time points of a series and total number of time points.
        self.time_points = Progress()
        self.creation_time = self.clock()
        self._work = work
        self._cancel_event = threading.Event()
        self._start_time: float | None = None
        self._last_window_time: float | None = None
        self._end_time: float | None = None

    @property
    def state(self) -> State:
        """Current state of the job."""
        if self.future.cancelled():
            return "cancelled"
        if not self.future.done():
            return "running" if self.future.running() else "waiting"
        if self.future.exception() is None:
            return "done"
        return "cancelled" if self._cancel_event.is_set() else "failed"

    @property
    def seconds_waited(self) -> float:
        """Seconds from the creation of the job until its work started, or until now if it has not started."""
        return (self._start_time if self._start_time is not None else self.clock()) - self.creation_time

    @property
    def seconds_run(self) -> float:
        """Seconds from the start of the work until its end, or until now if it has not ended; 0 before it starts."""
        return self._seconds_since(self._start_time)

    @property
    def seconds_finishing(self) -> float:
        """Seconds from the last window until the end of the work, or until now; 0 before the last window is done."""
        return self._seconds_since(self._last_window_time)

    def _seconds_since(self, start_time: float | None) -> float:
        if start_time is None:
            return 0.0
        return (self._end_time if self._end_time is not None else self.clock()) - start_time

    def cancel(self) -> None:
        """Cancel the job: immediately if it is waiting, otherwise when its work next polls `cancelled`."""
        self._cancel_event.set()
        if self.future.cancel():
            self._drop_work()

    def cancelled(self) -> bool:
        """Return whether the job was canceled. Its work may still be running."""
        return self._cancel_event.is_set()

    def advance(self, done: int, total: int) -> None:
        """Record the number of completed windows."""
        # Set the time first, so that it is available when other threads see that all windows are done.
        self._last_window_time = self.clock() if done == total else None
        self.progress = Progress(done, total)
        self.on_advance()

    def update_needs(self, needs: ResourceNeeds) -> None:
        """Notify the queue that the resources needed by the running work have changed."""
        self.on_needs_changed(self, needs)

    def run(self) -> None:
        """Run the work, unless the job was canceled while it was waiting. The caller passes exceptions to `fail`."""
        if not self.future.set_running_or_notify_cancel():
            return
        self._start_time = self.clock()
        try:
            result = self._work(self)
        finally:
            self._drop_work()
        self._end_time = self.clock()
        self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End the job with an error, in the thread that called `run`."""
        self._end_time = self.clock()
        if isinstance(error, StackSegError):
            # The message is sufficient, and the traceback would keep volumes in memory.
            _drop_tracebacks(error)
        self.future.set_exception(error)

    def fail_before_start(self, error: BaseException) -> None:
        """End a job that has not started with an error, unless it was canceled."""
        if self.future.set_running_or_notify_cancel():
            self._drop_work()
            self.fail(error)

    def add_done_callback(self, callback: Callable[[Job[T]], None]) -> None:
        """Call `callback` with the job when it has ended, in the thread that ended it."""
        # Use a weak reference, because the job refers to the future and therefore to the callback.
        reference = weakref.ref(self)

        def call_with_job(_future: Future[T]) -> None:
            job = reference()
            if job is not None:
                callback(job)

        self.future.add_done_callback(call_with_job)

    def _drop_work(self) -> None:
        """Release the work and everything that it refers to."""
        self._work, self.needs = _raise_already_run, ResourceNeeds


def _raise_already_run(_job: Job[Any]) -> NoReturn:
    raise AssertionError("a job must not run twice")


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its chained exceptions."""
    pending_errors: list[BaseException | None] = [error]
    while pending_errors:
        if (current_error := pending_errors.pop()) is not None and current_error.__traceback__ is not None:
            current_error.__traceback__ = None
            pending_errors += [current_error.__cause__, current_error.__context__]
