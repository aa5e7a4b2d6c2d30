"""The interface of a model that is loaded on a device, as a `typing.Protocol`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from service.core.types import Options, Volume
from service.models.spec import ModelSpec
from service.serving.devices.queue.job import Job, ResourceNeeds

if TYPE_CHECKING:
    from service.inference.runner.estimator import Estimator
    from service.inference.types import DiameterEstimate, EngineReport, PlannedRequest, ResourceEstimate, Result
    from service.inference.windows.batching.window_request import BatchShare
    from service.serving.metrics import Metrics

log = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Function called with the number of completed windows and the total number of windows."""


class DeviceModel(Protocol):
    """A model that is loaded on a device and processes the jobs in the queue of the device."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def estimator(self) -> Estimator: ...

    @property
    def nbytes(self) -> int:
        """Size in device memory, in bytes."""

    def report(self) -> EngineReport:
        """Return a report on the engine in use."""

    def segment(
        self,
        job: Job[Any],
        volume: Volume,
        options: Options,
        request: PlannedRequest | None,
        progress: ProgressCallback,
    ) -> Result:
        """Segment a volume [C, Z, Y, X] for a job, in a thread of the queue.

        request   the request as planned by `estimator`; None if it has not been planned yet
        progress  called with the number of completed windows, starting at 0, and the total number of windows

        Raises BadParameter, TooLarge, Cancelled, OutOfMemory, NonFiniteScores, DeviceLost and LowConfidenceResult. A
        device on another host also raises OutOfStorage, StorageUnavailable and JobInterrupted.
        """

    def estimate_diameter(self, job: Job[Any], volume: Volume, options: Options) -> DiameterEstimate | None:
        """Estimate the object diameter for a job; return None if `segment` would not estimate it.

        Raises the same errors as `segment`.
        """


def make_resource_needs(estimate: ResourceEstimate) -> ResourceNeeds:
    """Return the resources that a job with this estimate needs."""
    return ResourceNeeds(estimate.host_bytes, estimate.device_bytes, estimate.sw_batch_size)


class JobCounters(NamedTuple):
    """Counters for the windows and results of the jobs of one device.

    device  name of the device in the metrics
    """

    metrics: Metrics
    device: str

    def count_share(self, job: Job[Any], model: str, share: BatchShare) -> None:
        """Count the share of a job in a batch of windows."""
        self.metrics.count_batch(model, self.device, *share)
        job.device_seconds += share.device_seconds
        job.device_slots += share.num_slots

    def count_result(self, model: str, result: Result) -> None:
        """Count the memory fallbacks, the skipped windows and the recomputation of a result."""
        self.metrics.memory_fallbacks(model).inc(result.num_fallbacks)
        self.metrics.recomputed_volumes(model).inc(int(result.is_recomputed))
        if result.skipped is not None:
            self.metrics.skipped_windows(model).inc(result.skipped.windows)
            log.info("%s skipped %s", model, result.skipped)
