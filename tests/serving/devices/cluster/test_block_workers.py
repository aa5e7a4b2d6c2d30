"""Workers of a block-wise run, in actors that run in threads of the test."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest
from thread_actors import ThreadActor

from service.core.errors import BadParameter, InternalError
from service.inference.blockwise.run_folder import BlockTask
from service.inference.blockwise.workers import MAX_WORKER_DEATHS
from service.serving.devices.cluster.block_workers import ActorWorkers, BlockActor


def make_task(number: int) -> BlockTask:
    return BlockTask("/nowhere", "scores", number)


def test_block_of_a_lost_actor_is_restarted_on_another_actor() -> None:
    release_event, started_blocks = threading.Event(), list[int]()

    def work(block: BlockTask) -> dict[str, Any]:
        started_blocks.append(block.number)
        if started_blocks == [1]:
            release_event.wait(20)
        return {"number": block.number}

    first, second = actors = [ThreadActor(lambda: BlockActor(work)) for _ in range(2)]
    with closing(ActorWorkers(actors)) as workers:
        future = workers.submit(make_task(1))
        while not started_blocks:
            pass
        (first if first.was_called("run_block") else second).lose()
        assert future.result(20) == {"number": 1}
        assert [workers.submit(make_task(number)).result(20)["number"] for number in (2, 3)] == [2, 3]
        release_event.set()
    assert started_blocks == [1, 1, 2, 3]


def test_run_fails_if_a_block_kills_every_actor() -> None:
    actor = ThreadActor(lambda: BlockActor(lambda _block: {}))
    actor.failing_method = "run_block"
    with closing(ActorWorkers([actor])) as workers, pytest.raises(InternalError, match=f"{MAX_WORKER_DEATHS} workers"):
        workers.submit(make_task(1)).result(20)


def test_errors_of_the_block_function_are_raised() -> None:
    def work(_block: BlockTask) -> dict[str, Any]:
        raise BadParameter("invalid block")

    with closing(ActorWorkers([ThreadActor(lambda: BlockActor(work))])) as workers:
        for _ in range(2):
            with pytest.raises(BadParameter, match="invalid block"):
                workers.submit(make_task(1)).result(20)
