"""What the jobs of one device took, for the metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from service.serving.devices.queue.job import Job
from service.serving.metrics import Metrics

if TYPE_CHECKING:
    from service.inference.batching.window_request import Share
    from service.inference.result import Result

log = logging.getLogger(__name__)


class JobCounters(NamedTuple):
    """Counts the windows and results of one device's jobs; `device` is its name in metrics."""

    metrics: Metrics
    device: str

    def count_share(self, job: Job[Any], model: str, share: Share) -> None:
        """Count the share of a job in a batch of windows."""
        self.metrics.count_batch(model, self.device, *share)
        job.device_seconds += share.seconds
        job.device_slots += share.slots

    def count_result(self, model: str, result: Result) -> None:
        """Count what was skipped and what had to be computed again."""
        self.metrics.fallbacks(model).inc(result.fallbacks)
        self.metrics.recomputed(model).inc(int(result.recomputed))
        if result.skipped is not None:
            self.metrics.skipped(model).inc(result.skipped.windows)
            log.info("%s skipped %s", model, result.skipped)
