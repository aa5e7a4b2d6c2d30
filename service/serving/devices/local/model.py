"""A model that is loaded on a local device. No other module of `serving` runs segmentations in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from service.core.config import Settings
from service.core.hardware.devices import Driver
from service.core.types import Options, Volume
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import estimate_diameter, segment
from service.models.spec import ModelSpec
from service.serving.devices.models.model import ProgressCallback, make_resource_needs
from service.serving.devices.queue.job import Job

if TYPE_CHECKING:
    from service.inference.runner.callbacks import RunWindows
    from service.inference.runner.estimator import Estimator
    from service.inference.types import DiameterEstimate, EngineReport, PlannedRequest, ResourceEstimate, Result
    from service.serving.devices.local.torch_device import DeviceContext


class Segmenter(ModelRunner):
    """A model runner with methods for segmentation and diameter estimation, which `LocalModel` calls."""

    def segment(self, volume: Volume, options: Options, request: PlannedRequest | None, callbacks: Callbacks) -> Result:
        """Segment a volume, as `service.inference.segment.segment` does."""
        return segment(self, volume, options, request, callbacks)

    def estimate_diameter(self, volume: Volume, options: Options, callbacks: Callbacks) -> DiameterEstimate | None:
        """Estimate the object diameter, as `service.inference.segment.estimate_diameter` does."""
        return estimate_diameter(self, volume, options, callbacks)


class LocalModel:
    """`DeviceModel` for a segmenter on a local device. The segmenter must be warmed up before use."""

    def __init__(self, segmenter: Segmenter, context: DeviceContext) -> None:
        self.segmenter, self._context = segmenter, context

    @property
    def spec(self) -> ModelSpec:
        return self.segmenter.spec

    @property
    def estimator(self) -> Estimator:
        return self.segmenter.estimator

    @property
    def nbytes(self) -> int:
        return self.segmenter.nbytes

    def report(self) -> EngineReport:
        return self.segmenter.report()

    def segment(
        self,
        job: Job[Any],
        volume: Volume,
        options: Options,
        request: PlannedRequest | None,
        progress: ProgressCallback,
    ) -> Result:
        """Segment a volume [C, Z, Y, X] for a job, and count the result in the metrics."""

        def update_needs(estimate: ResourceEstimate) -> None:
            job.update_needs(make_resource_needs(estimate))

        with self._context.device.report_loss():
            callbacks = Callbacks(self._make_run_windows(job), job.cancelled, progress, update_needs)
            result = self.segmenter.segment(volume, options, request, callbacks)
        self._context.counters.count_result(self.spec.name, result)
        return result

    def estimate_diameter(self, job: Job[Any], volume: Volume, options: Options) -> DiameterEstimate | None:
        """Estimate the object diameter in a volume [C, Z, Y, X] for a job."""
        with self._context.device.report_loss():
            return self.segmenter.estimate_diameter(
                volume, options, Callbacks(self._make_run_windows(job), job.cancelled)
            )

    def _make_run_windows(self, job: Job[Any]) -> RunWindows:
        """Return a function that runs the network on the windows of a job, and counts the windows."""
        count_share = partial(self._context.counters.count_share, job, self.spec.name)
        return partial(self._context.batcher.run, due_time=job.deadline, report_share=count_share)


SegmenterFactory = Callable[[ModelSpec, Settings, Driver], Segmenter]


def load_model(
    make_segmenter: SegmenterFactory, spec: ModelSpec, settings: Settings, context: DeviceContext
) -> LocalModel:
    """Load a model onto a device, with a segmenter created by `make_segmenter`.

    Raises the same errors as `ModelRunner`.
    """
    return LocalModel(make_segmenter(spec, settings, context.device.driver), context)
