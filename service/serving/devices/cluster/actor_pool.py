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
from service.serving.devices.cluster.remote_actor import POLL_INTERVAL_SECONDS, ModelInUse, RemoteActor
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
    """Raised to move a waiting task to an idle actor. The task is already counted on that actor."""

    def __init__(self, actor: RemoteActor) -> None:
        self.actor = actor


class ActorPool:
    """All actors that this service may use, and the folder for exchanging pixels with these actors.

    make_actor             requests an actor, which may start later, from the cluster
    max_attempts           maximum number of attempts to run a task, which is restarted whenever its actor is lost
    unfinished_task_count  number of tasks that are running or waiting for an actor
    """

    def __init__(self, exchange: Exchange, make_actor: ActorFactory, cluster: Cluster, max_attempts: int) -> None:
        self.exchange, self._max_attempts = exchange, max_attempts
        self._min_workers, self._idle_seconds = cluster.min_workers, cluster.idle_seconds
        self._lock = threading.Lock()
        self._models: WeakSet[ModelInUse] = WeakSet()
        self.actors = [
            RemoteActor(f"ray-{number}", make_actor, exchange, self._lock, self._models)
            for number in range(1, cluster.workers + 1)
        ]
        self.unfinished_task_count = 0
        self.scale(0)

    def scale(self, count: int) -> None:
        """Request `count` actors from the cluster, and release other actors that have not been needed for a while.

        Prefer actors that are up, then actors that are starting, and then released actors.
        """
        now = time.monotonic()
        ranked_actors = sorted(self.actors, key=lambda actor: (not actor.is_up, actor.is_released))
        for rank, actor in enumerate(ranked_actors, 1):
            if rank <= max(count, self._min_workers):
                actor.request_actor(now)
            elif now - actor.last_needed > self._idle_seconds:
                actor.release()

    def add_model(self, model: ModelInUse) -> None:
        """Keep a model loaded in the actors as long as `model` is referenced."""
        with self._lock:
            self._models.add(model)

    def acquire_actor(self, preferred_actor: RemoteActor, lost_actors: Collection[RemoteActor]) -> RemoteActor | None:
        """Choose an actor for a task, and count the task on it; return None if no actor is up.

        Prefer actors that are not being released, then actors on which the task was not lost before, then the preferred
        actor, and then the least busy actor.
        """

        def rank(actor: RemoteActor) -> tuple[bool, bool, bool, int]:
            return actor.is_release_pending, actor in lost_actors, actor is not preferred_actor, actor.task_count

        with self._lock:
            actor = min((actor for actor in self.actors if actor.is_up), key=rank, default=None)
            if actor is not None:
                actor.task_count += 1
            return actor

    def acquire_idle_actor(self, busy_actor: RemoteActor) -> RemoteActor | None:
        """Choose an idle actor to take over a task from a busy actor, and count the task on it.

        Return None if no actor is idle, or if the busy actor has only this task.
        """
        with self._lock:
            idle_actors = (
                actor for actor in self.actors if actor.is_up and not actor.is_release_pending and not actor.task_count
            )
            actor = next(idle_actors, None) if busy_actor.task_count > 1 else None
            if actor is not None:
                actor.task_count += 1
            return actor

    def run(self, preferred_actor: RemoteActor, attempt: Attempt) -> Outcome:
        """Run a task on the preferred actor, or on another actor if the preferred one is not up or is lost.

        Raises Cancelled if the job was canceled, and JobInterrupted if `max_attempts` actors were lost while they were
        running the task.
        """
        self._change_unfinished_count(1)
        try:
            return self._run(preferred_actor, attempt)
        finally:
            self._change_unfinished_count(-1)

    def _change_unfinished_count(self, change: int) -> None:
        with self._lock:
            self.unfinished_task_count += change

    def _run(self, preferred_actor: RemoteActor, attempt: Attempt) -> Outcome:
        lost_actors: list[RemoteActor] = []
        idle_actor: RemoteActor | None = None
        while len(lost_actors) < self._max_attempts:
            if (actor := idle_actor or self.acquire_actor(preferred_actor, lost_actors)) is None:
                if attempt.cancelled():
                    raise Cancelled("The job was canceled before a worker of the cluster was available.")
                time.sleep(POLL_INTERVAL_SECONDS)
                continue
            idle_actor = None
            try:
                # Use a new id: a lost task is canceled on its actor, and actors reject canceled tasks.
                return self._run_attempt(actor, attempt._replace(task=attempt.task._replace(id=uuid.uuid4().hex)))
            except _MovedToIdleActor as error:
                idle_actor = error.actor
            except WorkerLost as error:
                log.warning("%s was lost while it was running a request, which is restarted: %s", actor.name, error)
                lost_actors.append(actor)
            finally:
                with self._lock:
                    actor.task_count -= 1
        raise JobInterrupted(
            f"{len(lost_actors)} workers of the cluster died while they were running this request. They probably ran"
            " out of memory."
        )

    def _run_attempt(self, actor: RemoteActor, attempt: Attempt) -> Outcome:
        """Run a task once, on the actor on which it is counted. Raises WorkerLost, Cancelled and _MovedToIdleActor."""
        future = actor.call(attempt.method, attempt.task)
        try:
            return self._wait_for_outcome(actor, future, attempt)
        except (Cancelled, WorkerLost, _MovedToIdleActor) as error:
            if isinstance(error, WorkerLost):
                actor.is_up = False
            actor.cancel_task(future, attempt.task)
            raise

    def _wait_for_outcome(self, actor: RemoteActor, future: Future[Any], attempt: Attempt) -> Outcome:
        task, last_progress = attempt.task, Progress()
        while not wait([future], POLL_INTERVAL_SECONDS).done:
            if attempt.cancelled():
                raise Cancelled("The job was canceled while it was running in the cluster.")
            if not actor.is_up:
                raise WorkerLost(f"{actor.name} does not respond")
            progress = actor.get_progress(task)
            if progress.total and progress != last_progress:
                last_progress = progress
                attempt.advance(*progress)
            if task.volume and not progress.total and (next_actor := self.acquire_idle_actor(actor)):
                raise _MovedToIdleActor(next_actor)
        outcome: Outcome = future.result()
        if isinstance(outcome.error, DeviceLost):
            raise WorkerLost(str(outcome.error))
        return outcome
