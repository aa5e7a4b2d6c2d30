from __future__ import annotations

import gc
import logging
import queue
import threading
import weakref

import pytest

from service.core.errors import BadFile
from service.serving.job_queue import JobThreads


class Recorded:
    """A task that raises what it is given, and remembers its thread and its failure."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.failure, self.thread = error, None, ""
        self.over = threading.Event()

    def run(self) -> None:
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        self.over.set()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.over.set()


def run(*tasks: Recorded) -> JobThreads:
    pending: queue.Queue[Recorded | None] = queue.Queue()
    for task in (*tasks, None):
        pending.put(task)
    worker = JobThreads("device", pending.get)
    worker.start()
    assert worker.join(10)
    return worker


def test_tasks_run_in_the_its_own_thread_and_none_ends_it() -> None:
    task = Recorded()
    worker = run(task)
    assert task.over.is_set()
    assert task.thread == "device"
    assert not worker.alive


@pytest.mark.parametrize("error", [BadFile("cut short"), RuntimeError("unforeseen"), AssertionError()])
def test_failed_task_gets_its_error_and_the_next_one_runs(error: Exception) -> None:
    failing, following = Recorded(error), Recorded()
    run(failing, following)
    assert failing.failure is error
    assert following.over.is_set()


def test_only_the_unforeseen_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run(Recorded(BadFile("cut short")))
        assert caplog.records == []
        run(Recorded(RuntimeError("unforeseen")))
    assert [record.exc_info is not None for record in caplog.records] == [True]


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


def test_threads_that_never_started_has_ended() -> None:
    assert JobThreads("idle", lambda: None).join(0)


def test_each_thread_begins_before_it_takes_a_task() -> None:
    told = list[str]()
    worker = JobThreads("request", lambda: told.append("take"), 3, lambda: told.append("begin"))
    worker.start()
    assert worker.join(10)
    assert told.count("begin") == told.count("take") == 3
    assert told[0] == "begin"
