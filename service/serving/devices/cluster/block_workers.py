"""Workers of a block-wise run, in actors of a cluster.

The run folder, the stack and the result must be on storage that all hosts mount.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from service.core.errors import Cancelled, InternalError
from service.inference.blockwise.workers import MAX_WORKER_DEATHS, BlockFunction, run_block
from service.serving.devices.cluster.actor import Actor, WorkerLost

if TYPE_CHECKING:
    from service.inference.blockwise.run_folder import BlockTask

# Time until a lost actor is called again, to check whether it has been restarted.
RETRY_INTERVAL_SECONDS = 1.0

log = logging.getLogger(__name__)


class BlockActor:
    """An actor that processes one block after another, with a model that stays loaded."""

    def __init__(self, work: BlockFunction = run_block) -> None:
        self._work = work

    def ping(self) -> None:
        """Return None. A successful call shows that the process is running."""

    def run_block(self, task: BlockTask) -> dict[str, Any]:
        """Process a block. Raises the same errors as the block function."""
        return self._work(task)


class ActorWorkers:
    """Workers of a block-wise run in actors. If an actor is lost, its block is restarted on the next free actor.

    An actor gets blocks only after it has responded. It gets no blocks while it waits for resources of the cluster, or
    while its host is unavailable.
    """

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.count = len(actors)
        self._actors = actors
        self._free_actors: SimpleQueue[Actor | None] = SimpleQueue()
        # Each thread waits for the block of one actor.
        self._executor = ThreadPoolExecutor(self.count, thread_name_prefix="block-worker")
        self._closed = threading.Event()
        for actor in actors:
            self._add_when_available(actor)

    def submit(self, task: BlockTask) -> Future[dict[str, Any]]:
        """Submit a block. The future returns the record of the block, or raises the same errors as `run_block`."""
        return self._executor.submit(self._run, task)

    def close(self) -> None:
        """Terminate the actors and cancel their blocks."""
        self._closed.set()
        for actor in self._actors:
            actor.kill()
        for _ in self._actors:
            self._free_actors.put(None)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, task: BlockTask) -> dict[str, Any]:
        for _ in range(MAX_WORKER_DEATHS):
            actor = self._free_actors.get()
            if actor is None:
                raise Cancelled("The workers have stopped.")
            try:
                record: dict[str, Any] = actor.call("run_block", task).result()
            except WorkerLost as error:
                log.warning(
                    "a worker was lost while it was processing %s %d, which is restarted: %s",
                    task.step,
                    task.number,
                    error,
                )
                self._add_when_available(actor)
            except BaseException:
                self._free_actors.put(actor)
                raise
            else:
                self._free_actors.put(actor)
                return record
        raise InternalError(
            f"{MAX_WORKER_DEATHS} workers died in succession during {task.step} {task.number}. Resume the run with"
            " smaller windows, or with more memory for each worker."
        )

    def _add_when_available(self, actor: Actor) -> None:
        """Add an actor to the free actors when it responds."""
        actor.call("ping").add_done_callback(partial(self._add_if_available, actor))

    def _add_if_available(self, actor: Actor, response: Future[Any]) -> None:
        if response.exception() is None:
            self._free_actors.put(actor)
        elif not self._closed.is_set():
            timer = threading.Timer(RETRY_INTERVAL_SECONDS, self._add_when_available, [actor])
            timer.daemon = True
            timer.start()
