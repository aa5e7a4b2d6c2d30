"""Score computation that falls back to smaller batches if memory runs out, and to FP32 if scores are not finite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from service.core.errors import NonFiniteScores
from service.core.hardware.devices import is_out_of_memory
from service.core.telemetry import Stages
from service.core.types import Views
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.callbacks import ComputeSlabs
from service.inference.runner.engine_builder import EngineBuilder, ReadyEngine
from service.inference.types import Plan
from service.inference.windows.blending import Slab
from service.inference.windows.sliding_window import Image, SlidingWindow, score_stack
from service.inference.windows.views import ViewAveragingNetwork


class ScoreConsumer(Protocol):
    """Consumer of slabs of scores, such as a decoder."""

    def add(self, z0: int, y0: int, scores: Tensor, /) -> None:
        """Add the scores [1, K, z, y, X] whose first plane is `z0` and whose first row is `y0`."""


C = TypeVar("C", bound=ScoreConsumer)


class ScoringResult(NamedTuple, Generic[C]):
    """Consumer that has received all scores. See `Result` for the meaning of the other fields."""

    consumer: C
    notes: tuple[str, ...]
    num_fallbacks: int
    is_recomputed: bool


class _ScoreCollector:
    """Consumer that collects the scores as planes [1, K, z, Y, X] with all rows."""

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def add(self, _z0: int, _y0: int, scores: Tensor) -> None:
        self.slabs.append(scores)


class ScoreComputer:
    """Computes scores with the network of one model. Thread-safe.

    builder         builds the networks for the fallbacks
    config          configuration of the engine
    engine          engine that is warm; None: no engine is warm yet, so run eagerly
    fit_batch_size  returns the number of windows per call for a requested batch size, like `Estimator.fit_batch_size`
    """

    def __init__(
        self,
        builder: EngineBuilder,
        config: EngineConfig,
        engine: ReadyEngine | None = None,
        fit_batch_size: Callable[[int], int] = lambda batch_size: batch_size,
    ) -> None:
        self._builder, self._config, self._engine, self._fit_batch_size = builder, config, engine, fit_batch_size
        # If the network itself runs eagerly in float32, recomputing the scores would change nothing.
        self._is_reference = config.engine == "eager" and config.precision == "fp32"
        self._windows_by_batch_size: WeakValueDictionary[int, SlidingWindow] = WeakValueDictionary()
        self._averaging_windows: WeakKeyDictionary[SlidingWindow, SlidingWindow] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @cached_property
    def module(self) -> nn.Module:
        """Prepared module, which is run eagerly if the warm engine does not support the request."""
        return self._builder.prepare_module(self._config) if self._engine is None else self._engine.module

    def compute_scores(
        self, image: Image, plan: Plan, make_consumer: Callable[[], C], stages: Stages, run: ComputeSlabs
    ) -> ScoringResult[C]:
        """Pass the scores of `image` to a new consumer. The batch size is halved until a batch fits in memory.

        If scores are not finite, all scores are recomputed by the FP32 network. Raises NonFiniteScores if the
        recomputed scores are not finite either. Propagates exceptions from the network.
        """
        # The request may have been planned before the network was loaded.
        batch_size, notes, num_fallbacks, is_recomputed = (
            self._fit_batch_size(plan.sw_batch_size),
            list[str](),
            0,
            False,
        )
        while True:
            consumer = make_consumer()
            window = self._get_window(batch_size, is_reference=is_recomputed)
            try:
                view_window = self._get_averaging_window(window, plan.views) if plan.views else window
                feed_slabs(consumer, run(view_window, image, plan.overlap), stages)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or batch_size == 1:
                    raise
                # Notes about batch sizes precede the note about recomputing, regardless of which happens first.
                notes.insert(num_fallbacks, f"A batch of {batch_size} windows did not fit in memory, so it was halved.")
                num_fallbacks, batch_size = num_fallbacks + 1, batch_size // 2
                _release_memory(window)
            except NonFiniteScores:
                if is_recomputed or self._is_reference:
                    raise
                engine_name = f"{self._config.engine}, {self._config.precision}"
                notes.append(f"The scores were not finite ({engine_name}) and were recomputed in eager fp32.")
                is_recomputed = True
            else:
                notes += [] if is_recomputed else self._list_engine_notes(window)
                return ScoringResult(consumer, tuple(notes), num_fallbacks, is_recomputed)

    def score_windows(self, windows: Tensor, plan: Plan, run: ComputeSlabs) -> Tensor:
        """Return the raw scores of windows [N, C, *roi], which are processed as one stack, float32 [N, K, *roi].

        Each window is scored once, regardless of the views in the plan. Raises the same exceptions as `compute_scores`.
        """
        single_view_plan = plan._replace(overlap=0.0, views=())
        return score_stack(
            windows,
            lambda stack: self.compute_scores(stack, single_view_plan, _ScoreCollector, Stages(), run).consumer.slabs,
        )

    def _get_window(self, batch_size: int, *, is_reference: bool) -> SlidingWindow:
        """Return the `SlidingWindow` of the FP32 reference or the warm engine, or one for a different batch size."""
        if is_reference:
            return self._builder.make_reference(batch_size)
        if self._engine is not None and self._config.sw_batch_size == batch_size:
            return self._engine.window
        # Concurrent requests for the same batch size share its batches.
        with self._lock:
            window = self._windows_by_batch_size.get(batch_size)
            if window is None:
                window = self._windows_by_batch_size[batch_size] = self._make_window(batch_size)
            return window

    def _get_averaging_window(self, window: SlidingWindow, views: Views) -> SlidingWindow:
        """Return a `SlidingWindow` that averages scores over views. Requests that get the same object share batches."""
        with self._lock:
            averaging_window = self._averaging_windows.get(window)
            if averaging_window is None:
                network = ViewAveragingNetwork(window.network, views)
                averaging_window = window.with_network(
                    network, accepts_partial_batches=window.accepts_partial_batches, owns_scores=True
                )
                self._averaging_windows[window] = averaging_window
            return averaging_window

    def _make_window(self, batch_size: int) -> SlidingWindow:
        if (
            self._engine is not None
            and self._fit_batch_size(batch_size) == batch_size
            and self._config.engine != "eager"
        ):
            return self._engine.window.with_capacity(batch_size)
        return self._builder.make_sliding_window(self.module, self._config, batch_size)

    def _list_engine_notes(self, window: SlidingWindow) -> list[str]:
        if self._engine is None or self._config.engine == "eager" or window.network is self._engine.window.network:
            return []
        return [f"The network ran eagerly, because it is compiled only for sw_batch_size={self._config.sw_batch_size}."]


def _release_memory(window: SlidingWindow) -> None:
    """Release the memory that torch has cached on a CUDA device."""
    if window.batch.is_cuda:
        torch.cuda.empty_cache()


def feed_slabs(consumer: ScoreConsumer, slabs: Iterator[Slab], stages: Stages) -> None:
    """Pass every slab to the consumer. The consumer's time counts as the stage `decode`, the rest as `windows`."""
    while True:
        with stages.measure("windows"):
            slab = next(slabs, None)
        if slab is None:
            return
        with stages.measure("decode"):
            consumer.add(slab.z0, slab.y0, slab.scores)
