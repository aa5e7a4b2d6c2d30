"""A model that is loaded on a device of this host: the one module of serving that segments in this process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from service.core.types import Options, Volume
from service.inference.runner.callbacks import Callbacks
from service.models.spec import ModelSpec
from service.serving.devices.local.torch_device import TorchDevice
from service.serving.devices.models.model import JobCounters, ReportProgress, needs_of
from service.serving.devices.queue.job import Job

if TYPE_CHECKING:
    from service.inference.runner.callbacks import RunWindows
    from service.inference.runner.estimator import Estimator
    from service.inference.types import EngineReport, Estimate, PlannedRequest, Result, Sizing
    from service.inference.windows.batching.batcher import WindowBatcher
    from service.serving.devices.local.segmenter import Segmenter


class ModelPlace(NamedTuple):
    """The device that a model is loaded on; `batcher` computes the windows of all requests together."""

    device: TorchDevice
    batcher: WindowBatcher
    counters: JobCounters


class LocalModel:
    """A segmenter that is warmed up, as `DeviceModel`."""

    def __init__(self, segmenter: Segmenter, place: ModelPlace) -> None:
        self.segmenter, self._place = segmenter, place

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
        self, job: Job[Any], volume: Volume, options: Options, request: PlannedRequest | None, progress: ReportProgress
    ) -> Result:
        """Segment a volume [C, Z, Y, X] for a job, and count what it took."""

        def revise(needed: Estimate) -> None:
            job.revise(needs_of(needed))

        with self._place.device.report_loss():
            callbacks = Callbacks(self._run_windows(job), job.cancelled, progress, revise)
            result = self.segmenter.segment(volume, options, request, callbacks)
        self._place.counters.count_result(self.spec.name, result)
        return result

    def estimate_diameter(self, job: Job[Any], volume: Volume, options: Options) -> Sizing | None:
        """Estimate the diameter of the objects of a volume [C, Z, Y, X] for a job."""
        with self._place.device.report_loss():
            return self.segmenter.estimate_diameter(volume, options, Callbacks(self._run_windows(job), job.cancelled))

    def _run_windows(self, job: Job[Any]) -> RunWindows:
        """Return what computes windows for a job, and counts them."""
        count = partial(self._place.counters.count_share, job, self.spec.name)
        return partial(self._place.batcher.run, due=job.due, share=count)
