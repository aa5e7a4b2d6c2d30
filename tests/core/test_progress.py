import contextvars
import logging
import queue
import threading
from contextlib import suppress
from functools import partial
from logging.handlers import QueueHandler

import pytest

from service.core.progress import Progress, step


def test_whoever_asks_is_told_the_steps_and_the_seconds_of_the_innermost():
    progress = Progress()
    assert not str(progress)
    with progress.follow():
        with step("racing"):
            assert str(progress) == "racing (for 0 s)"
            with suppress(OSError), step("building"):
                assert str(progress) == "racing: building (for 0 s)"
                raise OSError
            assert str(progress) == "racing (for 0 s)"
        assert not str(progress)


def test_steps_of_another_thread_are_told_where_it_runs_in_a_copy_of_the_context():
    progress, told = Progress(), []

    def work():
        with step("elsewhere"):
            told.append(str(progress))

    with progress.follow():
        for run in (partial(work), partial(contextvars.copy_context().run, work)):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    with step("not followed"):
        assert not str(progress)
    assert told == ["", "elsewhere (for 0 s)"]


@pytest.fixture
def lines():
    """Hand over the records that the log gets."""
    found = queue.Queue()
    logger, handler = logging.getLogger("service.core.progress"), QueueHandler(found)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield found
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_a_long_step_is_logged_while_it_is_the_innermost(lines):
    progress = Progress("loading nuclei")
    with progress.step("outer", 0.01), progress.step("inner", 0.01):
        assert lines.get(timeout=20).getMessage() == "loading nuclei: outer: inner (for 0 s)"
        assert lines.get(timeout=20).getMessage() == "loading nuclei: outer: inner (for 0 s)", "and again later"


def test_a_short_step_is_not_logged(lines):
    with step("short"):
        pass
    assert lines.empty()
