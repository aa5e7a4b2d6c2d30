from __future__ import annotations

import pytest
from fakes import Clock

from service.core.errors import BadFile
from service.serving.devices.queue.job import Job, Progress


def test_job_has_its_result_and_durations() -> None:
    clock = Clock()

    def work(job: Job[int]) -> int:
        job.advance(1, 3)
        clock.now += 2
        return 7

    job = Job("answer", work, clock=clock)
    clock.now += 1
    assert (job.state, job.seconds_run) == ("waiting", 0)
    job.run()
    clock.now += 4
    assert (job.state, job.future.result(), job.progress) == ("done", 7, Progress(1, 3))
    assert (job.seconds_waited, job.seconds_run) == (1, 2)


def test_failed_job_raises_its_error() -> None:
    def work(_job: Job[int]) -> int:
        raise BadFile("truncated")

    job = Job("broken", work)
    with pytest.raises(BadFile) as caught:
        job.run()
    job.fail(caught.value)
    assert job.state == "failed"
    with pytest.raises(BadFile, match="truncated"):
        job.future.result()


def test_job_cancelled_while_waiting_never_runs() -> None:
    ran = []
    job = Job("late", ran.append)
    job.cancel()
    job.run()
    assert (job.state, ran) == ("cancelled", [])
