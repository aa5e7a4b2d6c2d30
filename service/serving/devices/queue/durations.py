"""How long jobs take: learned from those that have ended, by the name of their model."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import Any

from service.serving.devices.queue.job import Job, Progress

RECENT_JOBS = 16
MAX_RETRY_AFTER = 120
# Only orders jobs until the first one of a model has been timed; callers never see it.
ASSUMED_SECONDS_PER_WINDOW = 0.1
# Time for decoding after the last window, as a share of the time for windows, until a job of the model was timed.
ASSUMED_FINISHING_SHARE = 0.1
# Decoding that takes less than this is too short to be timed.
MIN_TIMED_FINISHING_SECONDS = 0.1


class JobDurations:
    """Estimates of how long jobs take. Not thread-safe: `JobQueue` calls it with its lock.

    A job computes windows, and then finishes: it decodes scores and writes labels.
    """

    def __init__(self) -> None:
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_JOBS)
        self._seconds_per_window: dict[str, float] = {}
        # Seconds after the last window per second for windows.
        self._finishing_shares: dict[str, float] = {}

    def window_seconds(self, job: Job[Any]) -> float:
        """Return the seconds of the device for one window of a job."""
        return self._seconds_per_window.get(job.name, ASSUMED_SECONDS_PER_WINDOW)

    def device_seconds(self, job: Job[Any]) -> float:
        """Estimate the seconds of the device that a job still takes."""
        done, total = job.progress
        return (total - done if total else job.windows) * self.window_seconds(job)

    def seconds_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds of one job, from its own progress or else from earlier jobs with its model."""
        done, total = job.progress
        if done > 0:
            return job.seconds_run * (total - done) / done
        if job.windows and job.name in self._seconds_per_window:
            return max(job.windows * self._seconds_per_window[job.name] - job.seconds_run, 0.0)
        return None

    def finishing_left(self, job: Job[Any]) -> float | None:
        """Estimate the seconds of one job after its last window; None if it is finishing and takes unusually long."""
        share, elapsed = self._finishing_shares.get(job.name), job.seconds_finishing
        if elapsed > 0:
            left = (share or 0.0) * (job.seconds_run - elapsed) - elapsed
            return left if left > 0 else None
        done, total = job.progress
        windows = job.seconds_run * total / done if done else job.windows * self.window_seconds(job)
        return (share or 0.0) * windows

    def expect(self, name: str, windows: int) -> float | None:
        """Estimate the seconds that windows of a model take, with decoding; None before one was timed."""
        if name not in self._seconds_per_window:
            return None
        return windows * self._seconds_per_window[name] * (1 + self._finishing_shares.get(name, 0.0))

    def progress(self, job: Job[Any]) -> Progress:
        """Return the progress of a job in windows: decoding counts as many as are computed in its time."""
        done, total = job.progress if job.progress.total else Progress(0, job.windows)
        share = self._finishing_shares.get(job.name, ASSUMED_FINISHING_SHARE)
        finishing = max(math.ceil(share * total), 1)
        if (elapsed := job.seconds_finishing) > 0:
            expected = share * (job.seconds_run - elapsed)
            done += int(min(finishing * elapsed / max(expected, elapsed), finishing - 1))
        return Progress(done, total + finishing)

    def retry_after(self, running: Collection[Job[Any]]) -> int:
        """Estimate the whole seconds until a job ends, from its progress or else from the median of recent jobs."""
        known = [left for job in running if (left := self.seconds_left(job)) is not None]
        if known:
            left = min(known)
        elif self._recent_seconds:
            longest = max((job.seconds_run for job in running), default=0.0)
            left = statistics.median(self._recent_seconds) - longest
        else:
            return 5
        return min(max(math.ceil(left), 1), MAX_RETRY_AFTER)

    def learn(self, job: Job[Any]) -> None:
        """Learn from a job that is over how long its windows and its decoding took."""
        if job.state != "done":
            return
        if job.progress.total:
            measured = (job.device_seconds or job.seconds_run) / job.progress.total
            self._seconds_per_window[job.name] = (self._seconds_per_window.get(job.name, measured) + measured) / 2
        # The finishing time of a series is that of its last time point alone.
        if not job.points.total and job.seconds_finishing > MIN_TIMED_FINISHING_SECONDS:
            share = job.seconds_finishing / (job.seconds_run - job.seconds_finishing)
            self._finishing_shares[job.name] = (self._finishing_shares.get(job.name, share) + share) / 2

    def record_duration(self, job: Job[Any]) -> None:
        """Record how long a job took, for `retry_after`."""
        if job.state == "done":
            self._recent_seconds.append(job.seconds_run)
