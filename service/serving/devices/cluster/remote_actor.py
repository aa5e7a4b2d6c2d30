"""The state of one actor from the perspective of the service: requested or released, up or lost, and its tasks."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from service.serving.devices.cluster.actor import Actor, ActorFactory, WorkerLost
from service.serving.devices.cluster.exchange import ActorStatus, Exchange, Task
from service.serving.devices.queue.job import Progress

if TYPE_CHECKING:
    from service.models.spec import ModelSpec

# Interval between status queries.
STATUS_INTERVAL_SECONDS = 0.5
# Time without a response after which an actor counts as lost, so that its tasks run on other actors.
RESPONSE_TIMEOUT_SECONDS = 20.0
# Interval at which a thread that is waiting for an actor checks whether to stop waiting.
POLL_INTERVAL_SECONDS = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ModelInUse:
    """A model that this service has loaded in an actor.

    actor_name  name of the actor
    identity    unique name of this version of the model
    """

    actor_name: str
    identity: str
    spec: ModelSpec

    def make_load_task(self) -> Task:
        """Return a new task that loads the model."""
        return Task(uuid.uuid4().hex, self.identity, self.spec)


class RemoteActor:
    """An actor, which may have been requested from the cluster, and its latest status.

    A thread queries the status from `start` until `close`.

    lock                held while tasks are counted and actors are released
    models              models that actors keep loaded
    status              latest status; None before the actor is up
    task_count          number of tasks that are running on the actor
    last_needed         when the actor was last needed, on the clock of `time.monotonic`
    is_release_pending  whether the actor is released as soon as no task is running on it
    """

    def __init__(
        self,
        name: str,
        make_actor: ActorFactory,
        exchange: Exchange,
        lock: threading.Lock,
        models: WeakSet[ModelInUse],
    ) -> None:
        self.name, self._make_actor, self._exchange = name, make_actor, exchange
        self._lock, self._models = lock, models
        self._actor: Actor | None = None
        self.status: ActorStatus | None = None
        self.is_up = self.is_release_pending = False
        self.task_count = 0
        self.last_needed = -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Cancel all tasks and terminate the actor."""
        self._closed.set()
        if self._actor is not None:
            self._actor.kill()

    def join(self, timeout_seconds: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_released(self) -> bool:
        """Whether the actor is not requested from the cluster, because it is not needed."""
        return self._actor is None

    def request_actor(self, now: float) -> None:
        """Request the actor from the cluster, unless it has already been requested."""
        self.last_needed, self.is_release_pending = now, False
        if self._actor is None and not self._closed.is_set():
            log.info("requesting the worker %s from the cluster", self.name)
            self._actor = self._make_actor()

    def release(self) -> None:
        """Release the actor now, or as soon as no task is running on it."""
        with self._lock:
            self.is_release_pending = self._actor is not None
            if self._actor is None or self.task_count:
                return
            actor, self._actor = self._actor, None
            self.is_up, self.is_release_pending, self.status = False, False, None
        log.info("releasing the worker %s", self.name)
        actor.kill()

    @property
    def problem(self) -> str | None:
        """Reason why the actor is unavailable, in one sentence; None if it is available or was released."""
        if self.is_up or self.is_released:
            return None
        if self.status is None:
            return f"The worker {self.name} of the cluster has not started. Ray may not have the resources for it."
        if self.status.problem:
            return f"The worker {self.name} of the cluster on host {self.status.host} has failed: {self.status.problem}"
        return f"The worker {self.name} of the cluster on host {self.status.host} does not respond."

    def call(self, method: str, task: Task) -> Future[Any]:
        """Start a task that is counted on this actor.

        The future raises WorkerLost if the process has ended or is starting.
        """
        if self._actor is None:
            raise WorkerLost(f"{self.name} was released")
        return self._actor.call(method, task)

    def get_progress(self, task: Task) -> Progress:
        """Return the progress of a task in the latest status."""
        return Progress() if self.status is None else self.status.progress.get(task.id, Progress())

    def cancel_task(self, future: Future[Any], task: Task) -> None:
        """Cancel a task, even if it is running."""
        if self._actor is not None:
            self._actor.cancel_call(future)
            self._actor.call("cancel", task.id)

    def _loop(self) -> None:
        while not self._closed.wait(STATUS_INTERVAL_SECONDS):
            self._exchange.touch_marker()
            try:
                self._query_status()
            except Exception as error:  # noqa: BLE001 - the thread continues and queries the status again
                if self.is_up or not isinstance(error, WorkerLost):
                    log.warning("%s", self._mark_lost(str(error)))

    def _query_status(self) -> None:
        """Query the status of the actor. Wait for the response without a time limit. Raises any error of the actor."""
        actor = self._actor
        if actor is None:
            return
        future = actor.call("report_status", {model.identity for model in self._list_models()})
        if not self._wait_for_response(future, actor):
            return
        status: ActorStatus = future.result()
        if status.problem is None and not self.is_up:
            log.info("the worker %s of the cluster is up on %s", self.name, status.host)
            # A restarted actor has no loaded models.
            for model in self._list_models():
                if model.actor_name == self.name:
                    actor.call("load", model.make_load_task())
        with self._lock:
            # Ignore the response if the actor has been released in the meantime.
            if actor is self._actor:
                self.status, self.is_up = status, status.problem is None

    def _wait_for_response(self, future: Future[Any], actor: Actor) -> bool:
        """Wait for a response; return False if the actor is released or closed in the meantime."""
        deadline = time.monotonic() + RESPONSE_TIMEOUT_SECONDS
        while not wait([future], POLL_INTERVAL_SECONDS).done:
            if self._closed.is_set() or actor is not self._actor:
                return False
            self._exchange.touch_marker()
            if self.is_up and time.monotonic() > deadline:
                log.warning("%s", self._mark_lost("no response"))
        return True

    def _list_models(self) -> list[ModelInUse]:
        with self._lock:
            return list(self._models)

    def _mark_lost(self, reason: str) -> str:
        self.is_up = False
        return f"the worker {self.name} of the cluster is lost: {reason}"
