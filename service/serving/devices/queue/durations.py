"""Estimates of job durations, learned from completed jobs of the same model."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from typing import Any, NamedTuple

from service.serving.devices.queue.job import Job, Progress

# Number of recent jobs of a model that are considered.
RECENT_JOB_COUNT = 16
# Device time per window, assumed until a job of the model has been timed. Used only for ordering jobs, and never shown
# to clients.
ASSUMED_SECONDS_PER_WINDOW = 0.1
# Time after the last window relative to the time for windows, assumed until a job of the model has been timed.
ASSUMED_FINISHING_RATIO = 0.1
# Number of jobs of similar size whose durations predict the duration of a new job.
SIMILAR_JOB_COUNT = 5
# Jobs are of similar size if their number of windows differs at most by this factor more than that of the nearest job.
MAX_SIMILAR_SIZE_RATIO = 1.5
# Shorter finishing times are too inaccurate to learn from.
MIN_TIMED_FINISHING_SECONDS = 0.1


class Timing(NamedTuple):
    """Duration of a completed job, and the number of windows that was estimated for it."""

    window_count: int
    seconds: float


class JobDurations:
    """Estimates of job durations. Not thread-safe: `JobQueue` calls all methods with its lock held.

    A job first runs the network on windows. In its finishing phase, it decodes the remaining scores and writes the
    labels.
    """

    def __init__(self) -> None:
        # Seconds that each running job had for itself since the start of the service, if running jobs share evenly.
        self._shared_seconds, self._update_time = 0.0, 0.0
        # Newest first, by model.
        self._timings: defaultdict[str, deque[Timing]] = defaultdict(lambda: deque(maxlen=RECENT_JOB_COUNT))
        self._seconds_per_window: dict[str, float] = {}
        # Ratio of the finishing time to the time for windows, by model.
        self._finishing_ratios: dict[str, float] = {}

    def estimate_window_seconds(self, job: Job[Any]) -> float:
        """Estimate the device time for one window of a job in seconds."""
        return self._seconds_per_window.get(job.model_name, ASSUMED_SECONDS_PER_WINDOW)

    def estimate_device_seconds(self, job: Job[Any]) -> float:
        """Estimate the remaining device time of a job in seconds."""
        done, total = job.progress
        return (total - done if total else job.window_count) * self.estimate_window_seconds(job)

    def estimate_seconds_until_last_window(self, job: Job[Any]) -> float | None:
        """Estimate the seconds until the last window of a job is done; return None if unknown.

        The estimate is based on the progress of the job, or on earlier jobs of its model.
        """
        done, total = job.progress
        if done > 0:
            return job.seconds_run * (total - done) / done
        if job.window_count and job.model_name in self._seconds_per_window:
            return max(job.window_count * self._seconds_per_window[job.model_name] - job.seconds_run, 0.0)
        return None

    def estimate_finishing_seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the remaining finishing time in seconds; return None if finishing has taken longer than expected."""
        finishing_ratio, elapsed_seconds = self._finishing_ratios.get(job.model_name), job.seconds_finishing
        if elapsed_seconds > 0:
            seconds_left = (finishing_ratio or 0.0) * (job.seconds_run - elapsed_seconds) - elapsed_seconds
            return seconds_left if seconds_left > 0 else None
        done, total = job.progress
        window_seconds = (
            job.seconds_run * total / done if done else job.window_count * self.estimate_window_seconds(job)
        )
        return (finishing_ratio or 0.0) * window_seconds

    def estimate_new_job_seconds(self, model_name: str, window_count: int) -> float | None:
        """Estimate the duration of a job with this many windows; return None if no job of the model has been timed.

        The estimate is the typical duration per window of the jobs with the most similar numbers of windows. These
        durations include estimating the diameter and decoding. The numbers of windows are estimates as well, because
        the diameter of a stack is not known in advance.
        """
        timings = self._timings.get(model_name, ())
        distances = [abs(math.log(timing.window_count / max(window_count, 1))) for timing in timings]
        if not distances:
            return None
        max_distance = min(distances) + math.log(MAX_SIMILAR_SIZE_RATIO)
        seconds_per_window = [
            timing.seconds / timing.window_count
            for timing, distance in zip(timings, distances, strict=True)
            if distance <= max_distance
        ]
        return window_count * statistics.median_low(seconds_per_window[:SIMILAR_JOB_COUNT])

    def update_shared_seconds(self, now: float, running_count: int) -> float:
        """Return the seconds that each running job had for itself. Call this before the number of jobs changes."""
        self._shared_seconds += (now - self._update_time) / max(running_count, 1)
        self._update_time = now
        return self._shared_seconds

    def compute_progress(self, job: Job[Any]) -> Progress:
        """Return the progress of a job in windows. The finishing phase counts as an equivalent number of windows."""
        done, total = job.progress if job.progress.total else Progress(0, job.window_count)
        finishing_ratio = self._finishing_ratios.get(job.model_name, ASSUMED_FINISHING_RATIO)
        finishing_windows = max(math.ceil(finishing_ratio * total), 1)
        if (elapsed_seconds := job.seconds_finishing) > 0:
            expected_seconds = finishing_ratio * (job.seconds_run - elapsed_seconds)
            done += int(
                min(finishing_windows * elapsed_seconds / max(expected_seconds, elapsed_seconds), finishing_windows - 1)
            )
        return Progress(done, total + finishing_windows)

    def learn_from(self, job: Job[Any]) -> None:
        """Update the estimates for windows and for finishing from a job that has ended."""
        if job.state != "done":
            return
        if job.window_count:
            seconds = max(self._shared_seconds - job.shared_start_seconds, job.device_seconds)
            self._timings[job.model_name].appendleft(Timing(job.window_count, seconds))
        if job.progress.total:
            seconds = (job.device_seconds or job.seconds_run) / job.progress.total
            self._seconds_per_window[job.model_name] = (
                self._seconds_per_window.get(job.model_name, seconds) + seconds
            ) / 2
        # A series is skipped, because its finishing time covers only the last time point.
        if not job.time_points.total and job.seconds_finishing > MIN_TIMED_FINISHING_SECONDS:
            finishing_ratio = job.seconds_finishing / (job.seconds_run - job.seconds_finishing)
            self._finishing_ratios[job.model_name] = (
                self._finishing_ratios.get(job.model_name, finishing_ratio) + finishing_ratio
            ) / 2
