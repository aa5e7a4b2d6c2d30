"""A model on a device of this process, as `LocalModel` calls it."""

from __future__ import annotations

from service.core.types import Options, Volume
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import estimate_diameter, segment
from service.inference.types import PlannedRequest, Result, Sizing


class Segmenter(ModelRunner):
    """A model runner with the calls of a `LocalModel`."""

    def segment(self, volume: Volume, options: Options, request: PlannedRequest | None, callbacks: Callbacks) -> Result:
        """Segment a volume, as `service.inference.segment.segment` does."""
        return segment(self, volume, options, request, callbacks)

    def estimate_diameter(self, volume: Volume, options: Options, callbacks: Callbacks) -> Sizing | None:
        """Estimate the diameter of the objects, as `service.inference.segment.estimate_diameter` does."""
        return estimate_diameter(self, volume, options, callbacks)
