"""The one thread that may touch a device: it computes batches of windows, of several requests at once where it can.

Preparing, decoding and writing happen in the threads of the requests; what these wait for here is the network. A batch
has one shape whatever is in it, so windows of requests that run through the same network share its room.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from torch import Tensor

from service.errors import Cancelled
from service.windows import Image, Part, Slab, SlidingWindow

T = TypeVar("T")

# How often a request that waits looks whether it was cancelled, even if the device does not answer any more.
LOOK_SECONDS = 0.2


class Share(NamedTuple):
    """What one batch was for one request: its windows, and its part of the batch's slots and seconds."""

    windows: int
    slots: float
    seconds: float


class _Lane:
    """The windows of one request, between its own thread and the device's; `lock` guards what both change."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        due: float,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        share: Callable[[Share], None],
        lock: threading.Lock,
    ) -> None:
        self.window, self.due, self.cancelled = window, due, cancelled
        self.progress, self.share = progress, share
        self.passage = window.passage(image, overlap)
        self.slabs: deque[Slab] = deque()
        self.error: Exception | None = None
        self.over = False
        self.changed = threading.Condition(lock)

    @property
    def wants(self) -> bool:
        """Whether it can use a place in the next batch: windows are left, and what came of earlier ones was taken."""
        return self.passage.left > 0 and self.error is None and not self.slabs

    @property
    def answers(self) -> bool:
        return bool(self.slabs) or self.error is not None or self.over


class Device:
    """Owns the thread, named `name`, which calls `begin` first. Before `start` and after `close` nothing is computed.

    Two rules take turns in choosing whose windows are next. One takes the request that is due first: it is not passed
    for ever, and gets at least half of the device. The other takes the one with the fewest windows left, so that a
    small stack waits for a batch or two however large those are that came before it. What room a batch then has, the
    next ones by the same rule get, as far as they run through the same network.
    """

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._lanes: list[_Lane] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self._batches = 0
        self._computing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def pulse(self) -> int | None:
        """What changes with every batch of windows; None while none is computed."""
        return self._batches if self._computing else None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give up what is left and end the thread; whoever waits gets Cancelled."""
        with self._lock:
            self._closed = True
            self._work.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has ended; False if it has not after `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, run in the device's thread between two batches. Raises Cancelled."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again where it was called
                future.set_exception(error)

        with self._lock:
            self._check()
            self._calls.append(run)
            self._work.notify_all()
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                with self._lock:
                    self._check()

    def run(  # noqa: PLR0913
        self,
        window: SlidingWindow,
        image: Image,
        overlap: float,
        /,
        *,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        share: Callable[[Share], None] = lambda _share: None,
        due: float = 0.0,
    ) -> Iterator[Slab]:
        """Scores of `image` as `SlidingWindow.run` gives and refuses them, computed in the device's thread.

        `share` is told there of each batch with windows of this image. Raises Cancelled.
        """
        lane = _Lane(window, image, overlap, due, cancelled, progress, share, self._lock)
        with self._lock:
            self._check()
            self._lanes.append(lane)
            self._work.notify_all()
        try:
            while (slab := self._next(lane)) is not None:
                yield slab
        finally:
            with self._lock:
                self._lanes.remove(lane)

    def _check(self) -> None:
        if self._closed:
            raise Cancelled("the device is given up")

    def _next(self, lane: _Lane) -> Slab | None:
        """The next slab of this lane; None after the last one."""
        with self._lock:
            while not lane.changed.wait_for(lambda: lane.answers, LOOK_SECONDS):
                self._check()
                if lane.cancelled():
                    raise Cancelled(f"given up after {lane.passage.done} of {lane.passage.total} windows")
            if lane.error is not None:
                error, lane.error = lane.error, None
                try:
                    raise error
                finally:
                    del error  # which knows this frame, and with it the lane
            if not lane.slabs:
                return None
            slab = lane.slabs.popleft()
            self._work.notify_all()
            return slab

    def _loop(self) -> None:
        self._begin()
        while (work := self._wait()) is not None:
            if isinstance(work, list):
                self._compute(work)
            else:
                work()
            del work  # holds images and models, and the next may be hours away

    def _wait(self) -> Callable[[], None] | list[_Lane] | None:
        """What to do next: a call, or a batch of these lanes, in this order. None at the end."""
        with self._lock:
            self._computing = False
            while not self._closed:
                self._drop_cancelled()
                if self._calls:
                    return self._calls.popleft()
                if lanes := self._chosen():
                    self._computing = True
                    return lanes
                self._work.wait()
            return None

    def _drop_cancelled(self) -> None:
        for lane in self._lanes:
            if lane.error is None and not lane.over and lane.cancelled():
                lane.error = Cancelled(f"given up after {lane.passage.done} of {lane.passage.total} windows")
                lane.changed.notify_all()

    def _chosen(self) -> list[_Lane]:
        """Those with windows in the next batch, the one that must have some first."""
        lanes = [lane for lane in self._lanes if lane.wants]
        if self._batches % 2:
            lanes.sort(key=lambda lane: (lane.passage.left, lane.due))
        else:
            lanes.sort(key=lambda lane: lane.due)
        return [lane for lane in lanes if lane.window is lanes[0].window]

    def _compute(self, lanes: Sequence[_Lane]) -> None:
        self._batches += 1
        room = lanes[0].window.room
        parts = list[tuple[_Lane, Part]]()
        for lane in lanes:
            if not room:
                break
            parts.append((lane, lane.passage.take(room)))
            room -= len(parts[-1][1].places)
        if not self._forward(parts) and len(parts) > 1:
            # Whose fault it was does not show; alone, each gets what it deserves.
            for part in parts:
                self._forward([part])

    def _forward(self, parts: list[tuple[_Lane, Part]]) -> bool:
        """Compute and blend; False where nothing was computed, which is told to a request that is on its own."""
        began = time.monotonic()
        window = parts[0][0].window
        try:
            scores = window.forward([part for _, part in parts])
        except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
            if len(parts) == 1:
                self._deliver(parts[0][0], error)
            return False
        outcomes = [_blended(part, own) for (_, part), own in zip(parts, scores, strict=True)]
        taken = sum(len(part.places) for _, part in parts)
        # Only now has a GPU computed what it was told to.
        each = (time.monotonic() - began) / taken
        for (lane, part), outcome in zip(parts, outcomes, strict=True):
            mine, passage = len(part.places), part.passage
            if not isinstance(outcome, Exception):
                lane.share(Share(mine, mine * window.room / taken, mine * each))
                lane.progress(passage.done, passage.total)
            self._deliver(lane, outcome)
        return True

    def _deliver(self, lane: _Lane, what: list[Slab] | Exception) -> None:
        with self._lock:
            if isinstance(what, Exception):
                lane.error = lane.error or what
            else:
                lane.slabs.extend(what)
                lane.over = lane.passage.done == lane.passage.total
            lane.changed.notify_all()


def _blended(part: Part, scores: Tensor) -> list[Slab] | Exception:
    """The slabs that became final, or what was wrong with these scores."""
    try:
        return part.passage.blend(part.places, scores)
    except Exception as error:  # noqa: BLE001 - raised again in the thread of the request
        return error
