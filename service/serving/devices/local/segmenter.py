"""A model on a device of this process, as `LocalModel` calls it."""

from __future__ import annotations

from collections.abc import Callable

from service.core.types import Options, Volume
from service.inference.runner.callbacks import Callbacks, Cancelled, Progress, RunWindows
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import ALONE, estimate_diameter, segment
from service.inference.types import Estimate, PlannedRequest, Result, Sizing


class Segmenter(ModelRunner):
    """A model runner with the calls of a `LocalModel`."""

    def segment(  # noqa: PLR0913
        self,
        volume: Volume,
        options: Options,
        *,
        request: PlannedRequest | None = None,
        cancelled: Cancelled = ALONE.cancelled,
        progress: Progress = ALONE.progress,
        run: RunWindows = ALONE.run,
        revised: Callable[[Estimate], object] = ALONE.revised,
    ) -> Result:
        """Segment a volume, as `service.inference.segment.segment` does."""
        return segment(self, volume, options, request, Callbacks(run, cancelled, progress, revised))

    def estimate_diameter(
        self,
        volume: Volume,
        options: Options,
        *,
        cancelled: Cancelled = ALONE.cancelled,
        run: RunWindows = ALONE.run,
    ) -> Sizing | None:
        """Estimate how wide the objects of a volume are; None where `segment` with these options would not."""
        return estimate_diameter(self, volume, options, Callbacks(run, cancelled))
