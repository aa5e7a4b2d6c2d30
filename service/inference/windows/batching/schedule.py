"""Selection of the requests for the next batch, and of the batches that may run concurrently."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from service.inference.windows.batching.window_request import BatchSlice, WindowRequest
from service.inference.windows.sliding_window import SlidingWindow


class Batch(NamedTuple):
    """Batch to compute.

    number        counted from the start of the batcher
    batch_slices  windows of the batch, by request
    stream        stream that computes it
    sharing       number of streams that share the device while it is computed
    """

    number: int
    batch_slices: list[BatchSlice]
    stream: int
    sharing: int


class Running(NamedTuple):
    """Batch that is being computed: the `SlidingWindow` that runs it, and the stream."""

    window: SlidingWindow
    stream: int


def choose_requests(waiting: Sequence[WindowRequest], number: int) -> list[WindowRequest]:
    """Return the requests that may fill batch `number`, in order of priority; all of them use the same network."""
    requests = [request for request in waiting if request.is_ready]
    if len(requests) < 2:
        return requests
    if number % 2:
        requests.sort(key=lambda request: (request.scan.left, request.due))
    else:
        requests.sort(key=lambda request: request.due)
    return [request for request in requests if request.window is requests[0].window]


def may_add(requests: Sequence[WindowRequest], busy: Collection[Running], depth: int) -> bool:
    """Return whether a batch of these requests may start next to the `busy` ones, with `depth` batches per stream."""
    if not busy:
        return True
    window = requests[0].window
    max_streams = min([window.streams, *[running.window.streams for running in busy]])
    if len(busy) >= max_streams * depth:
        return False
    return window.accepts_any_batch_size or sum([request.scan.left for request in requests]) >= window.capacity
