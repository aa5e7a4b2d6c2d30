from __future__ import annotations

import pytest
from fakes import Clock

from service.core.errors import QueueFull
from service.serving.devices.queue.job import Job
from service.serving.devices.queue.job_queue import JobQueue


def read_retry_after(queue: JobQueue) -> int | None:
    with pytest.raises(QueueFull) as full:
        queue.check_admission()
    return full.value.retry_after


def test_retry_after_is_the_median_of_recent_durations() -> None:
    queue, clock = JobQueue(0), Clock()
    # No duration is known at first, then the median of the previous jobs.
    for seconds, expected in ((0, 5), (1.2, 1), (1.3, 1), (0, 2)):

        def work(_job: Job[None], seconds: float = seconds) -> None:
            clock.now += seconds

        job = Job("timed", work, clock=clock)
        queue.offer(job)
        assert queue.take() is job
        assert read_retry_after(queue) == expected
        job.run()


def test_retry_after_is_the_remaining_time_of_the_running_job_up_to_an_hour() -> None:
    queue, clock = JobQueue(0), Clock()
    retry_seconds = []

    def work(job: Job[None]) -> None:
        for done in (1, 5, 9):
            clock.now += 1200
            job.advance(done, 10)
            retry_seconds.append(read_retry_after(queue))

    job = Job("long", work, clock=clock)
    queue.offer(job)
    assert queue.take() is job
    job.run()
    # After 1 of 10 windows, three hours are left.
    assert retry_seconds == [3600, 2400, 400]
