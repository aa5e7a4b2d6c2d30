"""Throughput of requests: windows are cut, computed and blended in every stream, while others are decoded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from service.core import hardware
from service.core.errors import NonFiniteScores
from service.inference.decoding.decoders import Decoder
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import SlidingWindow

# Alone in its row a window is not blended with anything.
LEAST_WINDOWS = 2


class StreamThreads:
    """Threads that compute and decode as those of a device and of requests do."""

    def __init__(self) -> None:
        self._streams: dict[int, ThreadPoolExecutor] = {}
        # A request has one thread.
        self.decoding = ThreadPoolExecutor(1, "decode", partial(hardware.use_threads, 1))

    def streams(self, number: int) -> ThreadPoolExecutor:
        """Return this number of threads, each with its part of the cores that the caller has."""
        if number not in self._streams:
            share = partial(hardware.use_threads, max(torch.get_num_threads() // number, 1))
            self._streams[number] = ThreadPoolExecutor(number, "stream", share)
        return self._streams[number]

    def close(self) -> None:
        """End all threads."""
        for pool in (self.decoding, *self._streams.values()):
            pool.shutdown()


class Throughput:
    """Windows of requests, as many for each stream as one batch has; every call computes them.

    Forwards alone do not tell how fast requests are. One stream with all cores may be quickest by itself, and yet waits
    at every layer for the core on which somebody decodes, while of several streams the others go on.

    window   computes them
    row      number of windows -> an image, float32 [1, C, Z, Y, X], on which they lie in a row with that overlap
    decoder  makes the decoder of one such image
    """

    def __init__(
        self,
        window: SlidingWindow,
        row: Callable[[int], Tensor],
        overlap: float,
        decoder: Callable[[Tensor], Decoder],
        threads: StreamThreads,
    ) -> None:
        length = max(window.capacity, LEAST_WINDOWS)
        self._window, self._overlap, self._threads = window, overlap, threads
        self._image = row(length)
        self._decoder = partial(decoder, self._image)
        self.windows = length * window.streams
        self._rows = self._computed()

    def __call__(self) -> None:
        """Compute all rows, while those of the call before are decoded. Raises what the network raises.

        Scores that are not finite end a row; it is for others to say so.
        """
        decoding = self._threads.decoding.submit(self._decode, self._rows)
        self._rows = self._computed()
        decoding.result()

    def _computed(self) -> list[list[Slab]]:
        streams = self._window.streams
        if streams == 1:
            # Here: graphs that were recorded on CUDA belong to the thread that recorded them.
            return [self._through(0)]
        return list(self._threads.streams(streams).map(self._through, range(streams)))

    @torch.inference_mode()
    def _through(self, stream: int) -> list[Slab]:
        slabs: list[Slab] = []
        with suppress(NonFiniteScores):
            slabs.extend(self._window.run(self._image, self._overlap, stream=stream))
        return slabs

    @torch.inference_mode()
    def _decode(self, rows: list[list[Slab]]) -> None:
        for slabs in rows:
            decoder = self._decoder()
            for slab in slabs:
                decoder.add(slab.z0, slab.y0, slab.scores)
            decoder.finish()
