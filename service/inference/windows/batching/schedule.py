"""Selection of the requests for the next batch, and of the batches that may run concurrently."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from service.inference.windows.batching.window_request import BatchSlice, WindowRequest
from service.inference.windows.sliding_window import SlidingWindow


class Batch(NamedTuple):
    """Batch to compute.

    number              number of the batch, counted from the start of the batcher
    batch_slices        windows of the batch, one slice per request
    stream              index of the stream that computes the batch
    num_active_streams  number of streams that share the device while the batch is computed
    """

    number: int
    batch_slices: list[BatchSlice]
    stream: int
    num_active_streams: int


class RunningBatch(NamedTuple):
    """Batch that is being computed: the `SlidingWindow` that runs it, and the index of its stream."""

    window: SlidingWindow
    stream: int


def choose_requests(all_requests: Sequence[WindowRequest], batch_number: int) -> list[WindowRequest]:
    """Return the requests that may fill a batch, in order of priority. All of them use the same network."""
    requests = [request for request in all_requests if request.is_ready]
    if len(requests) < 2:
        return requests
    if batch_number % 2:
        requests.sort(key=lambda request: (request.scan.num_remaining, request.due_time))
    else:
        requests.sort(key=lambda request: request.due_time)
    return [request for request in requests if request.sliding_window is requests[0].sliding_window]


def can_start(
    requests: Sequence[WindowRequest], running_batches: Collection[RunningBatch], max_stream_batches: int
) -> bool:
    """Return whether a batch of these requests may start in addition to the running ones.

    max_stream_batches  maximum number of unfinished batches of a stream
    """
    if not running_batches:
        return True
    window = requests[0].sliding_window
    max_streams = min([window.streams, *[batch.window.streams for batch in running_batches]])
    if len(running_batches) >= max_streams * max_stream_batches:
        return False
    return (
        window.accepts_partial_batches or sum([request.scan.num_remaining for request in requests]) >= window.capacity
    )
