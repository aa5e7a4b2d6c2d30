"""Score computation with two fallbacks: smaller batches if memory runs out, and FP32 for non-finite scores."""

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
from service.inference.windows.views import AveragedViews


class ScoreConsumer(Protocol):
    """Consumer of slabs of scores, such as a decoder."""

    def add(self, z0: int, y0: int, scores: Tensor, /) -> None:
        """Add the scores [1, K, z, y, X] whose first plane is `z0` and whose first row is `y0`."""


C = TypeVar("C", bound=ScoreConsumer)


class ScoringResult(NamedTuple, Generic[C]):
    """Consumer that has received all scores; `notes`, `fallbacks` and `recomputed` are those of the `Result`."""

    consumer: C
    notes: tuple[str, ...]
    fallbacks: int
    recomputed: bool


class _ScoreCollector:
    """Consumer that collects the scores as planes [1, K, z, Y, X] with all rows."""

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def add(self, _z0: int, _y0: int, scores: Tensor) -> None:
        self.slabs.append(scores)


class ScoreComputer:
    """Computes scores with the network of one model. Thread-safe.

    builder    builds the networks for the fallbacks
    config     configuration of the network
    ready      network that is warm; None: none yet, run eagerly
    fit_batch  returns the windows per call for a requested number, like `Estimator.fit_batch`
    """

    def __init__(
        self,
        builder: EngineBuilder,
        config: EngineConfig,
        ready: ReadyEngine | None = None,
        fit_batch: Callable[[int], int] = lambda batch_size: batch_size,
    ) -> None:
        self._builder, self._config, self._ready, self._fit_batch = builder, config, ready, fit_batch
        # In this case, recomputing in eager float32 would change nothing.
        self._is_reference = config.engine == "eager" and config.precision == "fp32"
        self._smaller_windows: WeakValueDictionary[int, SlidingWindow] = WeakValueDictionary()
        self._viewed_windows: WeakKeyDictionary[SlidingWindow, SlidingWindow] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @cached_property
    def module(self) -> nn.Module:
        """Prepared module, which runs eagerly if the warm network does not fit the request."""
        return self._builder.module(self._config) if self._ready is None else self._ready.module

    def compute(
        self, image: Image, plan: Plan, make_consumer: Callable[[], C], stages: Stages, run: ComputeSlabs
    ) -> ScoringResult[C]:
        """Pass the scores of `image` to a new consumer. The batch size is halved until the batch fits in memory.

        If scores are not finite, all of them are recomputed by the FP32 network. Raises NonFiniteScores if those are
        not finite either, and the exceptions of the network.
        """
        # The request may have been planned before the network was loaded.
        batch_size, notes, fallbacks, recomputed = self._fit_batch(plan.sw_batch_size), list[str](), 0, False
        while True:
            consumer = make_consumer()
            window = self._window(batch_size, reference=recomputed)
            try:
                used = self._with_views(window, plan.views) if plan.views else window
                feed(consumer, run(used, image, plan.overlap), stages)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or batch_size == 1:
                    raise
                # Keep these notes before the note on recomputing, regardless of which happens first.
                notes.insert(fallbacks, f"A batch of {batch_size} windows did not fit in memory; used a smaller one.")
                fallbacks, batch_size = fallbacks + 1, batch_size // 2
                _release_memory(window)
            except NonFiniteScores:
                if recomputed or self._is_reference:
                    raise
                how = f"{self._config.engine}, {self._config.precision}"
                notes.append(f"The scores were not finite ({how}) and were recomputed in eager fp32.")
                recomputed = True
            else:
                notes += [] if recomputed else self._notes(window)
                return ScoringResult(consumer, tuple(notes), fallbacks, recomputed)

    def score_windows(self, windows: Tensor, plan: Plan, run: ComputeSlabs) -> Tensor:
        """Return the raw scores, float32 [N, K, *roi], of windows [N, C, *roi], which are computed as one stack.

        Each window is scored once, regardless of the views in the plan. Raises the exceptions of `compute`.
        """
        single_scoring = plan._replace(overlap=0.0, views=())
        return score_stack(
            windows, lambda stack: self.compute(stack, single_scoring, _ScoreCollector, Stages(), run).consumer.slabs
        )

    def _window(self, batch_size: int, *, reference: bool) -> SlidingWindow:
        """Return the FP32 reference, the warm window, one with a smaller batch, or an eager one."""
        if reference:
            return self._builder.reference(batch_size)
        if self._ready is not None and self._config.sw_batch_size == batch_size:
            return self._ready.window
        # Concurrent requests for the same batch size share its batches.
        with self._lock:
            window = self._smaller_windows.get(batch_size)
            if window is None:
                window = self._smaller_windows[batch_size] = self._make_window(batch_size)
            return window

    def _with_views(self, window: SlidingWindow, views: Views) -> SlidingWindow:
        """Return windows that are scored in several views. Equal calls return one object, so requests share batches."""
        with self._lock:
            viewed = self._viewed_windows.get(window)
            if viewed is None:
                network = AveragedViews(window.network, views)
                viewed = window.with_network(
                    network, accepts_any_batch_size=window.accepts_any_batch_size, owns_scores=True
                )
                self._viewed_windows[window] = viewed
            return viewed

    def _make_window(self, batch_size: int) -> SlidingWindow:
        if self._ready is not None and self._fit_batch(batch_size) == batch_size and self._config.engine != "eager":
            return self._ready.window.with_capacity(batch_size)
        return self._builder.sliding_window(self.module, self._config, batch_size)

    def _notes(self, used: SlidingWindow) -> list[str]:
        if self._ready is None or self._config.engine == "eager" or used.network is self._ready.window.network:
            return []
        return [f"Ran eagerly, because only sw_batch_size {self._config.sw_batch_size} is compiled."]


def _release_memory(window: SlidingWindow) -> None:
    """Release memory that torch has cached on a CUDA device."""
    if window.batch.is_cuda:
        torch.cuda.empty_cache()


def feed(consumer: ScoreConsumer, slabs: Iterator[Slab], stages: Stages) -> None:
    """Pass every slab to the consumer. Its time counts as the stage `decode`, the rest as `windows`."""
    while True:
        with stages.measure("windows"):
            slab = next(slabs, None)
        if slab is None:
            return
        with stages.measure("decode"):
            consumer.add(slab.z0, slab.y0, slab.scores)
