"""Actors of a cluster as workers of a block-wise run, whose folder, stack and result all hosts mount."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from service.core.errors import Cancelled, InternalError
from service.inference.blockwise.workers import MOST_DEATHS, Work, run_block
from service.serving.devices.cluster.actor import Actor, WorkerLost

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import BlockTask

# After which an actor that was lost is asked again whether it is there.
AGAIN_SECONDS = 1.0

log = logging.getLogger(__name__)


class BlockActor:
    """Actor of the cluster that does one block after the other, with a model that stays loaded."""

    def __init__(self, work: Work = run_block) -> None:
        self._work = work

    def ready(self) -> None:
        """Return once the process is there."""

    def run_block(self, task: BlockTask) -> dict[str, Any]:
        """Do a block. Raises what the work raises."""
        return self._work(task)


class ActorWorkers:
    """Workers of a block-wise run, each an actor. A block whose actor is lost begins again on the next that is free.

    An actor gets blocks from when it is there: one without a place in the cluster, or whose host is gone, gets none.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.count = len(actors)
        self._actors = actors
        self._free: SimpleQueue[Actor | None] = SimpleQueue()
        # Each thread waits for one block.
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="block-worker")
        self._closed = threading.Event()
        for actor in actors:
            self._await(actor)

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        """Have a block done; return its record, or what the work raises."""
        return self._threads.submit(self._run, task)

    def close(self) -> None:
        """End the actors; what they were doing is given up."""
        self._closed.set()
        for actor in self._actors:
            actor.kill()
        for _ in self._actors:
            self._free.put(None)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, task: BlockTask) -> dict[str, Any]:
        for _ in range(MOST_DEATHS):
            actor = self._free.get()
            if actor is None:
                raise Cancelled("the workers have ended")
            try:
                record: dict[str, Any] = actor.call("run_block", task).result()
            except WorkerLost as error:
                log.warning("a worker was lost with %s %d, which begins again: %s", task.step, task.number, error)
                self._await(actor)
            except BaseException:
                self._free.put(actor)
                raise
            else:
                self._free.put(actor)
                return record
        raise InternalError(
            f"{MOST_DEATHS} workers ended one after the other over {task.step} {task.number}; with smaller windows, or"
            " more memory for each, the run can be resumed."
        )

    def _await(self, actor: Actor) -> None:
        """Count an actor as free once it answers."""
        actor.call("ready").add_done_callback(partial(self._answered, actor))

    def _answered(self, actor: Actor, answer: Future[Any]) -> None:
        if answer.exception() is None:
            self._free.put(actor)
        elif not self._closed.is_set():
            again = threading.Timer(AGAIN_SECONDS, self._await, [actor])
            again.daemon = True
            again.start()
