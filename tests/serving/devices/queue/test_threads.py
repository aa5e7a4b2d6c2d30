from __future__ import annotations

import gc
import logging
import queue
import threading
import weakref
from typing import Any

import pytest
from fakes import wait_until

from service.core.errors import BadFile
from service.serving.devices.queue.job import Job, ResourceNeeds
from service.serving.devices.queue.job_queue import JobQueue
from service.serving.devices.queue.threads import JobThreads


class FakeTask:
    """A task that raises a given error, and records the error that it gets back."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.failure = error, None
        self.has_ended = threading.Event()

    def run(self) -> None:
        if self.error is not None:
            raise self.error
        self.has_ended.set()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.has_ended.set()


def run(*tasks: FakeTask) -> None:
    pending: queue.Queue[FakeTask | None] = queue.Queue()
    for task in (*tasks, None):
        pending.put(task)
    worker = JobThreads("device", pending.get)
    worker.start()
    assert worker.join(10)


@pytest.mark.parametrize(
    ("error", "logged"), [(BadFile("truncated"), []), (RuntimeError("unexpected"), [True]), (AssertionError(), [True])]
)
def test_failed_task_gets_its_error_and_the_next_task_runs(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: list[bool]
) -> None:
    failing, following = FakeTask(error), FakeTask()
    with caplog.at_level(logging.DEBUG):
        run(failing, following)
    assert failing.failure is error
    assert following.has_ended.is_set()
    # Only unexpected errors are logged, with their traceback.
    assert [record.exc_info is not None for record in caplog.records] == logged


def test_finished_task_is_freed() -> None:
    pending: queue.Queue[FakeTask | None] = queue.Queue()
    worker = JobThreads("device", pending.get)
    worker.start()
    task = FakeTask()
    has_ended, reference = task.has_ended, weakref.ref(task)
    pending.put(task)
    del task
    assert has_ended.wait(10)
    following = FakeTask()
    pending.put(following)
    assert following.has_ended.wait(10)
    gc.collect()
    assert reference() is None
    pending.put(None)
    assert worker.join(10)


def test_each_thread_calls_the_initializer_before_taking_a_task() -> None:
    calls = list[str]()
    worker = JobThreads("request", lambda: calls.append("take"), 3, lambda: calls.append("initialize"))
    assert worker.join(0)
    worker.start()
    assert worker.join(10)
    assert calls.count("initialize") == calls.count("take") == 3
    assert calls[0] == "initialize"


def make_job(windows: int) -> Job[int]:
    return Job("m", lambda _job: 7, window_count=windows)


def test_waiting_thread_starts_a_job_when_it_becomes_useful() -> None:
    queue, taken = JobQueue(max_waiting=30), list[object]()
    first, second = make_job(1000), make_job(1000)
    queue.offer(first)
    queue.offer(second)
    assert queue.take() is first
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    thread.join(0.05)
    assert taken == []
    first.advance(999, 1000)
    thread.join(10)
    assert taken == [second]


def test_notified_thread_is_not_notified_again_before_it_wakes() -> None:
    queue, checks = JobQueue(max_waiting=4), list[int]()

    def needs() -> ResourceNeeds:
        checks.append(1)
        return ResourceNeeds()

    taken = list[Job[Any] | None]()
    waiting = threading.Thread(target=lambda: taken.append(queue.take()))
    waiting.start()
    job = Job("m", lambda _job: 7, needs=needs)
    with queue._condition:
        queue.offer(job)
        for _ in range(5):
            queue.mark_ready(job)
        assert len(checks) == 1
    waiting.join(10)
    assert taken == [job]


def test_work_wakes_one_thread_and_closing_wakes_all() -> None:
    queue, taken = JobQueue(max_waiting=30), list[object]()
    threads = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(5)]
    first, second, last = make_job(20), make_job(20), make_job(1)
    last.is_ready = False
    queue.offer(last)
    queue.offer(first)
    assert queue.take() is first
    for thread in threads:
        thread.start()
    queue.put(second)
    assert taken == []
    first.run()
    wait_until(lambda: taken)
    for thread in threads:
        thread.join(0.05)
    assert taken == [second]
    queue.close()
    last.cancel()
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, taken)) == sorted(map(str, [second, None, None, None, None]))
