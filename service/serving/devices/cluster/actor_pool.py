"""The pool of all actors of a service: scaling, and assignment of tasks."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from service.core.errors import Cancelled, DeviceLost, JobInterrupted
from service.core.sections.computing import Cluster
from service.serving.devices.cluster.actor import ActorFactory, ProgressCallback, WorkerLost
from service.serving.devices.cluster.remote_actor import POLL_SECONDS, ModelInUse, RemoteActor
from service.serving.devices.queue.job import Progress

if TYPE_CHECKING:
    from service.serving.devices.cluster.exchange import Exchange, Outcome, Task

log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """An attempt to run a task on an actor, with the callbacks of its job."""

    method: str
    task: Task
    cancelled: Callable[[], bool]
    advance: ProgressCallback


class _MovedToIdleActor(Exception):
    """Raised to move a task that has not begun to an idle actor, on which it is already counted."""

    def __init__(self, actor: RemoteActor) -> None:
        self.actor = actor


class ActorPool:
    """All actors that this service may use, and the folder through which they exchange pixels.

    make_actor        requests an actor from the cluster, which may start later
    attempts          maximum number of actors on which a task is started if they are lost
    unfinished_tasks  number of tasks that are running or waiting for an actor
    """

    def __init__(self, exchange: Exchange, make_actor: ActorFactory, cluster: Cluster, attempts: int) -> None:
        self.exchange, self._attempts = exchange, attempts
        self._min_workers, self._idle_seconds = cluster.min_workers, cluster.idle_seconds
        self._lock = threading.Lock()
        self._models: WeakSet[ModelInUse] = WeakSet()
        self.actors = [
            RemoteActor(f"ray-{number}", make_actor, exchange, self._lock, self._models)
            for number in range(1, cluster.workers + 1)
        ]
        self.unfinished_tasks = 0
        self.scale(0)

    def scale(self, count: int) -> None:
        """Request `count` actors from the cluster, and release further actors that were not needed for a while.

        Actors that are up are preferred over actors that are starting, and these over actors that were released.
        """
        now = time.monotonic()
        order = sorted(self.actors, key=lambda actor: (not actor.is_up, actor.given_back))
        for number, actor in enumerate(order, 1):
            if number <= max(count, self._min_workers):
                actor.request(now)
            elif now - actor.last_needed > self._idle_seconds:
                actor.give_back()

    def add(self, model: ModelInUse) -> None:
        """Keep a model loaded in the actors as long as `model` is referenced."""
        with self._lock:
            self._models.add(model)

    def acquire(self, preferred: RemoteActor, lost: Collection[RemoteActor]) -> RemoteActor | None:
        """Choose an actor for a task and count the task there; return None if no actor is up.

        Prefer actors that are not being released, then actors on which the task was not lost before, then the preferred
        actor, and then the least busy actor.
        """

        def rank(actor: RemoteActor) -> tuple[bool, bool, bool, int]:
            return actor.is_leaving, actor in lost, actor is not preferred, actor.tasks

        with self._lock:
            actor = min((actor for actor in self.actors if actor.is_up), key=rank, default=None)
            if actor is not None:
                actor.tasks += 1
            return actor

    def acquire_idle(self, busy: RemoteActor) -> RemoteActor | None:
        """Choose an idle actor for a task of a busy actor that has further tasks, and count the task there.

        Return None if there is no idle actor or if the task is the only one of its actor.
        """
        with self._lock:
            idle = (actor for actor in self.actors if actor.is_up and not actor.is_leaving and not actor.tasks)
            actor = next(idle, None) if busy.tasks > 1 else None
            if actor is not None:
                actor.tasks += 1
            return actor

    def run(self, preferred: RemoteActor, attempt: Attempt) -> Outcome:
        """Run a task on the preferred actor, or on another one if that is not up or is lost.

        Raises Cancelled, and JobInterrupted if the task was lost with as many actors as may be tried.
        """
        self._add_unfinished(1)
        try:
            return self._run(preferred, attempt)
        finally:
            self._add_unfinished(-1)

    def _add_unfinished(self, change: int) -> None:
        with self._lock:
            self.unfinished_tasks += change

    def _run(self, preferred: RemoteActor, attempt: Attempt) -> Outcome:
        lost: list[RemoteActor] = []
        idle_actor: RemoteActor | None = None
        while len(lost) < self._attempts:
            if (actor := idle_actor or self.acquire(preferred, lost)) is None:
                if attempt.cancelled():
                    raise Cancelled("cancelled before a worker of the cluster was available")
                time.sleep(POLL_SECONDS)
                continue
            idle_actor = None
            try:
                # A new id, because the actor rejects cancelled tasks, and a lost task is cancelled on its actor.
                return self._attempt(actor, attempt._replace(task=attempt.task._replace(id=uuid.uuid4().hex)))
            except _MovedToIdleActor as error:
                idle_actor = error.actor
            except WorkerLost as error:
                log.warning("%s was lost while it ran a request, which is restarted: %s", actor.name, error)
                lost.append(actor)
            finally:
                with self._lock:
                    actor.tasks -= 1
        raise JobInterrupted(
            f"{len(lost)} workers of the cluster died while they ran this request. They probably ran out of memory."
        )

    def _attempt(self, actor: RemoteActor, attempt: Attempt) -> Outcome:
        """Run a task once on an actor on which it is counted. Raises WorkerLost, Cancelled and _MovedToIdleActor."""
        future = actor.call(attempt.method, attempt.task)
        try:
            return self._wait(actor, future, attempt)
        except (Cancelled, WorkerLost, _MovedToIdleActor) as error:
            if isinstance(error, WorkerLost):
                actor.is_up = False
            actor.give_up(future, attempt.task)
            raise

    def _wait(self, actor: RemoteActor, future: Future[Any], attempt: Attempt) -> Outcome:
        task, reported = attempt.task, Progress()
        while not wait([future], POLL_SECONDS).done:
            if attempt.cancelled():
                raise Cancelled("cancelled while it ran in the cluster")
            if not actor.is_up:
                raise WorkerLost(f"{actor.name} does not respond")
            done = actor.progress(task)
            if done.total and done != reported:
                reported = done
                attempt.advance(*done)
            if task.volume and not done.total and (idle := self.acquire_idle(actor)):
                raise _MovedToIdleActor(idle)
        outcome: Outcome = future.result()
        if isinstance(outcome.error, DeviceLost):
            raise WorkerLost(str(outcome.error))
        return outcome
