import threading

import pytest
import torch

from service.inference.throughput import StreamThreads, Throughput
from service.inference.windows.blending import Blending
from service.inference.windows.sliding_window import SlidingWindow

ROI = (4, 4, 4)
OVERLAP = 0.5


class Decoder:
    """Puts the scores of a row together again."""

    def __init__(self, image, seen):
        self.scores, self.seen = torch.full(image.shape, -1.0), seen

    def add(self, z0, y0, scores):
        self.scores[:, :, z0 : z0 + scores.shape[2], y0 : y0 + scores.shape[3]] = scores

    def finish(self):
        self.seen.append((self.scores, threading.current_thread().name))


@pytest.fixture
def crews():
    found = StreamThreads()
    yield found
    found.close()


def row(windows):
    return torch.arange(16.0 * (2 + 2 * windows)).view(1, 1, 4, 4, -1)


def windows(network, batch_size, streams):
    device = torch.device("cpu")
    return SlidingWindow(network, 1, ROI, batch_size, blending=Blending(), device=device, streams=streams)


@pytest.mark.parametrize(("batch_size", "streams", "expected"), [(1, 1, 2), (2, 1, 2), (3, 2, 6)])
def test_a_call_computes_a_batch_of_each_stream_and_no_window_alone(crews, batch_size, streams, expected):
    calls, seen = [], []

    def network(batch):
        calls.append(len(batch))
        return batch.clone()

    pace = Throughput(windows(network, batch_size, streams), row, OVERLAP, lambda image: Decoder(image, seen), crews)
    assert pace.windows == expected
    calls.clear()
    pace()
    assert sum(calls) == expected


def test_the_rows_of_the_call_before_are_decoded_elsewhere(crews):
    seen = []
    pace = Throughput(
        windows(lambda batch: batch.clone(), 2, 2), row, OVERLAP, lambda image: Decoder(image, seen), crews
    )
    assert not seen
    pace()
    assert len(seen) == 2
    for scores, thread in seen:
        torch.testing.assert_close(scores, row(2))
        assert thread.startswith("decode")


def test_streams_compute_at_the_same_time_in_threads_of_their_own(crews):
    both = threading.Barrier(2, timeout=20)
    threads = set()

    def network(batch):
        both.wait()
        threads.add(threading.current_thread().name)
        return batch.clone()

    Throughput(windows(network, 2, 2), row, OVERLAP, lambda image: Decoder(image, []), crews)()
    assert len(threads) == 2
    assert threading.current_thread().name not in threads


def test_one_stream_computes_where_it_is_called(crews):
    threads = set()

    def network(batch):
        threads.add(threading.current_thread())
        return batch.clone()

    Throughput(windows(network, 2, 1), row, OVERLAP, lambda image: Decoder(image, []), crews)()
    assert threads == {threading.current_thread()}


def test_scores_that_are_not_finite_are_for_others_to_find(crews):
    pace = Throughput(windows(lambda b: b * float("nan"), 2, 1), row, OVERLAP, lambda image: Decoder(image, []), crews)
    pace()


def test_what_a_network_raises_comes_out(crews):
    def broken(_batch):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Throughput(windows(broken, 2, 2), row, OVERLAP, lambda image: Decoder(image, []), crews)
