"""The time after which a client should repeat a request for which a queue has no place (`Retry-After`)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import Any

from service.serving.devices.queue.durations import JobDurations
from service.serving.devices.queue.job import Job

# Maximum number of recent jobs whose median duration is used.
RECENT_JOB_COUNT = 16
# Longest time if it is derived from the progress of running jobs. They may be canceled earlier.
MAX_SECONDS_BY_PROGRESS = 3600
# Longest time if the remaining time of running jobs is unknown.
MAX_SECONDS = 120
# Time if no job has been timed.
DEFAULT_SECONDS = 5


class RetryAfter:
    """Estimates when a running job ends and makes a place free. Not thread-safe."""

    def __init__(self, durations: JobDurations) -> None:
        self._durations = durations
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_JOB_COUNT)

    def estimate_seconds(self, running_jobs: Collection[Job[Any]]) -> int:
        """Estimate the seconds until a running job ends, from its progress or the median duration of recent jobs."""
        estimates = [
            seconds
            for job in running_jobs
            if (seconds := self._durations.estimate_seconds_until_last_window(job)) is not None
        ]
        if estimates:
            return min(max(math.ceil(min(estimates)), 1), MAX_SECONDS_BY_PROGRESS)
        if not self._recent_seconds:
            return DEFAULT_SECONDS
        max_seconds_run = max((job.seconds_run for job in running_jobs), default=0.0)
        seconds_left = statistics.median(self._recent_seconds) - max_seconds_run
        return min(max(math.ceil(seconds_left), 1), MAX_SECONDS)

    def record_duration(self, job: Job[Any]) -> None:
        """Record the duration of a job that has ended."""
        if job.state == "done":
            self._recent_seconds.append(job.seconds_run)
