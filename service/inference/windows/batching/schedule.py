"""Choice of the windows of the next batch, and whether it may be computed alongside others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from service.inference.windows.batching.window_request import BatchSlice, WindowRequest
from service.inference.windows.sliding_window import SlidingWindow


class Batch(NamedTuple):
    """Batch to compute: its number since the start, windows, stream, and how many streams share the device then."""

    number: int
    batch_slices: list[BatchSlice]
    stream: int
    sharing: int


class Running(NamedTuple):
    """Batch that is being computed: its windows, and its stream of these."""

    window: SlidingWindow
    stream: int


def choose_requests(waiting: Sequence[WindowRequest], number: int) -> list[WindowRequest]:
    """Return the requests for the next batch, which has this number, first the one whose turn it is."""
    requests = [request for request in waiting if request.is_ready]
    if len(requests) < 2:
        return requests
    if number % 2:
        requests.sort(key=lambda request: (request.scan.left, request.due))
    else:
        requests.sort(key=lambda request: request.due)
    return [request for request in requests if request.window is requests[0].window]


def may_add(requests: Sequence[WindowRequest], busy: Collection[Running], depth: int) -> bool:
    """Return whether a batch of these requests may be computed alongside the busy ones, `depth` in each stream."""
    if not busy:
        return True
    window = requests[0].window
    fewest = min([window.streams, *[running.window.streams for running in busy]])
    if len(busy) >= fewest * depth:
        return False
    return window.any_batch_size or sum([request.scan.left for request in requests]) >= window.capacity
