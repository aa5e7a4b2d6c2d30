"""All actors of a service: how many it asks for, and which of them does a task."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Collection
from typing import Protocol

from service.core.config import Cluster
from service.core.errors import Cancelled, Interrupted
from service.serving.devices.cluster.actor import MakeActor, WorkerLost
from service.serving.devices.cluster.exchange import Exchange, Outcome, Task
from service.serving.devices.cluster.remote_actor import POLL_SECONDS, Attempt, MovedElsewhere, RemoteActor

log = logging.getLogger(__name__)


class ModelInUse(Protocol):
    """A model that is loaded in an actor: `RemoteModel`."""

    @property
    def actor(self) -> RemoteActor: ...

    @property
    def identity(self) -> str:
        """Name of the model among all versions of all models."""

    def load_task(self) -> Task:
        """Return the task to load the model."""


class ActorPool:
    """All actors that this service may have, with the folder through which they get pixels.

    make_actor  asks the cluster for an actor, which need not be there yet
    attempts    how often a task is begun whose actors die
    unfinished  how many tasks run, and wait for an actor
    """

    def __init__(self, exchange: Exchange, make_actor: MakeActor, cluster: Cluster, attempts: int) -> None:
        self.exchange, self._attempts = exchange, attempts
        self._least, self._idle_seconds = cluster.least, cluster.idle_seconds
        self.lock = threading.Lock()
        self.actors = [RemoteActor(f"ray-{number}", make_actor, self) for number in range(1, cluster.workers + 1)]
        self._models: weakref.WeakSet[ModelInUse] = weakref.WeakSet()
        self.unfinished = 0
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex[:8]
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
        """Have a model stay in the actors as long as it is in use."""
        with self.lock:
            self._models.add(model)

    def models_in_use(self) -> set[str]:
        """Return the names of all models that actors have to keep."""
        return {model.identity for model in self._list_models()}

    def load_tasks(self, actor: RemoteActor) -> list[Task]:
        """Return the tasks that load the models which this service has loaded in an actor."""
        return [model.load_task() for model in self._list_models() if model.actor is actor]

    def renew_exchange(self) -> None:
        """Mark the shared folder as in use."""
        self.exchange.renew()

    def next_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def take(self, preferred: RemoteActor, lost: Collection[RemoteActor]) -> RemoteActor | None:
        """Return the actor that a task runs on, if any is up, and count it there.

        One that stays comes first, then one where it was not lost before, the preferred one, and the least busy.
        """

        def rank(actor: RemoteActor) -> tuple[bool, bool, bool, int]:
            return actor.leaving, actor in lost, actor is not preferred, actor.tasks

        with self.lock:
            actor = min((actor for actor in self.actors if actor.up), key=rank, default=None)
            if actor is not None:
                actor.tasks += 1
            return actor

    def take_idle(self, busy: RemoteActor) -> RemoteActor | None:
        """Return an actor with nothing to do for a task of one that has others, and count it there."""
        with self.lock:
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
        with self.lock:
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
                return actor.attempt(attempt._replace(task=attempt.task._replace(id=self.next_id())))
            except MovedElsewhere as error:
                chosen = error.actor
            except WorkerLost as error:
                log.warning("%s was lost with a request, which begins again: %s", actor.name, error)
                lost.append(actor)
            finally:
                with self.lock:
                    actor.tasks -= 1
        raise Interrupted(f"{len(lost)} workers of the cluster have ended while they did this; memory is likely short.")

    def _list_models(self) -> list[ModelInUse]:
        with self.lock:
            return list(self._models)
