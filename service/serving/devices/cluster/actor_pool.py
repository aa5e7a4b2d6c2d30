"""All actors of a service: how many it asks for, and which of them does a task."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from service.core.errors import Cancelled, DeviceLost, Interrupted
from service.core.sections.computing import Cluster
from service.serving.devices.cluster.actor import Advance, MakeActor, WorkerLost
from service.serving.devices.cluster.remote_actor import POLL_SECONDS, ModelInUse, RemoteActor
from service.serving.devices.queue.job import Progress

if TYPE_CHECKING:
    from service.serving.devices.cluster.exchange import Exchange, Outcome, Task

log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A task on its way to an actor, with the calls of its job."""

    method: str
    task: Task
    cancelled: Callable[[], bool]
    advance: Advance


class _MovedElsewhere(Exception):
    """A task that has not begun goes to an actor that has nothing to do, where it has a place already."""

    def __init__(self, actor: RemoteActor) -> None:
        self.actor = actor


class ActorPool:
    """All actors that this service may have, with the folder through which they get pixels.

    make_actor  asks the cluster for an actor, which need not be there yet
    attempts    how often a task is begun whose actors die
    unfinished  how many tasks run, and wait for an actor
    """

    def __init__(self, exchange: Exchange, make_actor: MakeActor, cluster: Cluster, attempts: int) -> None:
        self.exchange, self._attempts = exchange, attempts
        self._least, self._idle_seconds = cluster.least, cluster.idle_seconds
        self._lock = threading.Lock()
        self._models: WeakSet[ModelInUse] = WeakSet()
        self.actors = [
            RemoteActor(f"ray-{number}", make_actor, exchange, self._lock, self._models)
            for number in range(1, cluster.workers + 1)
        ]
        self.unfinished = 0
        self.adjust(0)

    def adjust(self, wanted: int) -> None:
        """Ask the cluster for so many actors, and give back those beyond them that were not wanted for a while.

        Those that are up are kept rather than those that are awaited, and these rather than others.
        """
        now = time.monotonic()
        order = sorted(self.actors, key=lambda actor: (not actor.up, actor.given_back))
        for number, actor in enumerate(order, 1):
            if number <= max(wanted, self._least):
                actor.ask_for(now)
            elif now - actor.wanted > self._idle_seconds:
                actor.give_back()

    def add(self, model: ModelInUse) -> None:
        """Have a model stay in the actors as long as something refers to it."""
        with self._lock:
            self._models.add(model)

    def take(self, preferred: RemoteActor, lost: Collection[RemoteActor]) -> RemoteActor | None:
        """Return the actor that a task runs on, if any is up, and count it there.

        One that stays comes first, then one where it was not lost before, the preferred one, and the least busy.
        """

        def rank(actor: RemoteActor) -> tuple[bool, bool, bool, int]:
            return actor.leaving, actor in lost, actor is not preferred, actor.tasks

        with self._lock:
            actor = min((actor for actor in self.actors if actor.up), key=rank, default=None)
            if actor is not None:
                actor.tasks += 1
            return actor

    def take_idle(self, busy: RemoteActor) -> RemoteActor | None:
        """Return an actor with nothing to do for a task of one that has others, and count it there."""
        with self._lock:
            idle = (actor for actor in self.actors if actor.up and not actor.leaving and not actor.tasks)
            actor = next(idle, None) if busy.tasks > 1 else None
            if actor is not None:
                actor.tasks += 1
            return actor

    def run(self, preferred: RemoteActor, attempt: Attempt) -> Outcome:
        """Do a task on the preferred actor, or another if that is not up or is lost.

        Raises Cancelled, and Interrupted once as many actors were lost as are tried.
        """
        self._count(1)
        try:
            return self._run(preferred, attempt)
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.unfinished += more

    def _run(self, preferred: RemoteActor, attempt: Attempt) -> Outcome:
        lost: list[RemoteActor] = []
        chosen: RemoteActor | None = None
        while len(lost) < self._attempts:
            if (actor := chosen or self.take(preferred, lost)) is None:
                if attempt.cancelled():
                    raise Cancelled("given up before a worker of the cluster was there")
                time.sleep(POLL_SECONDS)
                continue
            chosen = None
            try:
                # An actor refuses a task that was cancelled there, as one is with which it was lost.
                return self._attempt(actor, attempt._replace(task=attempt.task._replace(id=uuid.uuid4().hex)))
            except _MovedElsewhere as error:
                chosen = error.actor
            except WorkerLost as error:
                log.warning("%s was lost with a request, which begins again: %s", actor.name, error)
                lost.append(actor)
            finally:
                with self._lock:
                    actor.tasks -= 1
        raise Interrupted(f"{len(lost)} workers of the cluster have ended while they did this; memory is likely short.")

    def _attempt(self, actor: RemoteActor, attempt: Attempt) -> Outcome:
        """Do a task once on an actor where it has a place. Raises WorkerLost, Cancelled and _MovedElsewhere."""
        future = actor.call(attempt.method, attempt.task)
        try:
            return self._wait(actor, future, attempt)
        except (Cancelled, WorkerLost, _MovedElsewhere) as error:
            if isinstance(error, WorkerLost):
                actor.up = False
            actor.give_up(future, attempt.task)
            raise

    def _wait(self, actor: RemoteActor, future: Future[Any], attempt: Attempt) -> Outcome:
        task, reported = attempt.task, Progress()
        while not wait([future], POLL_SECONDS).done:
            if attempt.cancelled():
                raise Cancelled("given up while it ran in the cluster")
            if not actor.up:
                raise WorkerLost(f"{actor.name} does not answer")
            done = actor.progress(task)
            if done.total and done != reported:
                reported = done
                attempt.advance(*done)
            if task.volume and not done.total and (idle := self.take_idle(actor)):
                raise _MovedElsewhere(idle)
        outcome: Outcome = future.result()
        if isinstance(outcome.error, DeviceLost):
            raise WorkerLost(str(outcome.error))
        return outcome
