from __future__ import annotations

import gc
import logging
import queue
import threading
import weakref
from typing import Any

import pytest
from fakes import until

from service.core.errors import BadFile
from service.serving.devices.queue.job import Job, Needs
from service.serving.devices.queue.job_queue import JobQueue
from service.serving.devices.queue.threads import JobThreads


class Recorded:
    """A task that raises what it is given, and remembers its failure."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.failure = error, None
        self.over = threading.Event()

    def run(self) -> None:
        if self.error is not None:
            raise self.error
        self.over.set()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.over.set()


def run(*tasks: Recorded) -> None:
    pending: queue.Queue[Recorded | None] = queue.Queue()
    for task in (*tasks, None):
        pending.put(task)
    worker = JobThreads("device", pending.get)
    worker.start()
    assert worker.join(10)


@pytest.mark.parametrize(
    ("error", "logged"), [(BadFile("cut short"), []), (RuntimeError("unforeseen"), [True]), (AssertionError(), [True])]
)
def test_failed_task_gets_its_error_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: list[bool]
) -> None:
    failing, following = Recorded(error), Recorded()
    with caplog.at_level(logging.DEBUG):
        run(failing, following)
    assert failing.failure is error
    assert following.over.is_set()
    # Only the unforeseen is logged, with its traceback.
    assert [record.exc_info is not None for record in caplog.records] == logged


def test_finished_task_is_not_kept_alive() -> None:
    pending: queue.Queue[Recorded | None] = queue.Queue()
    worker = JobThreads("device", pending.get)
    worker.start()
    task = Recorded()
    over, known = task.over, weakref.ref(task)
    pending.put(task)
    del task
    assert over.wait(10)
    following = Recorded()
    pending.put(following)
    assert following.over.wait(10)
    gc.collect()
    assert known() is None
    pending.put(None)
    assert worker.join(10)


def test_each_thread_begins_before_it_takes_a_task() -> None:
    told = list[str]()
    worker = JobThreads("request", lambda: told.append("take"), 3, lambda: told.append("begin"))
    assert worker.join(0)
    worker.start()
    assert worker.join(10)
    assert told.count("begin") == told.count("take") == 3
    assert told[0] == "begin"


def sized(windows: int) -> Job[int]:
    return Job("m", lambda _job: 7, windows=windows)


def test_thread_that_waits_notices_that_another_job_is_of_use_now() -> None:
    queue, taken = JobQueue(limit=30), list[object]()
    first, second = sized(1000), sized(1000)
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


def test_who_was_called_is_not_called_again_before_looking() -> None:
    queue, looked = JobQueue(limit=4), list[int]()

    def needs() -> Needs:
        looked.append(1)
        return Needs()

    taken = list[Job[Any] | None]()
    waiting = threading.Thread(target=lambda: taken.append(queue.take()))
    waiting.start()
    job = Job("m", lambda _job: 7, needs=needs)
    with queue._changed:
        queue.offer(job)
        for _ in range(5):
            queue.release(job)
        assert len(looked) == 1
    waiting.join(10)
    assert taken == [job]


def test_every_thread_learns_of_the_end_and_one_of_work() -> None:
    queue, taken = JobQueue(limit=30), list[object]()
    threads = [threading.Thread(target=lambda: taken.append(queue.take())) for _ in range(5)]
    first, second, last = sized(20), sized(20), sized(1)
    last.ready = False
    queue.offer(last)
    queue.offer(first)
    assert queue.take() is first
    for thread in threads:
        thread.start()
    queue.put(second)
    assert taken == []
    first.run()
    until(lambda: taken)
    for thread in threads:
        thread.join(0.05)
    assert taken == [second]
    queue.close()
    last.cancel()
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, taken)) == sorted(map(str, [second, None, None, None, None]))
