"""One actor as the service sees it: whether it was asked for, whether it is up, and the tasks that run there."""

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

from service.serving.devices.cluster.actor import Actor, MakeActor, WorkerLost
from service.serving.devices.cluster.exchange import Exchange, Status, Task
from service.serving.devices.queue.job import Progress

if TYPE_CHECKING:
    from service.models.spec import ModelSpec

# How often an actor is asked for its state, and after how many seconds without an answer its tasks run elsewhere.
STATUS_SECONDS = 0.5
SILENT_SECONDS = 20.0
# How often a thread that waits for an actor checks whether it still should.
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ModelInUse:
    """A model that this service has loaded in an actor.

    actor     name of the actor
    identity  name of the model among all versions of all models
    """

    actor: str
    identity: str
    spec: ModelSpec

    def load_task(self) -> Task:
        """Return the task to load the model."""
        return Task(uuid.uuid4().hex, self.identity, self.spec)


class RemoteActor:
    """One actor, if the cluster was asked for it, and what is known of it.

    A thread asks for its state, from `start` to `close`.

    lock     held while tasks are counted and actors are given back
    models   what actors keep, as long as something refers to it
    status   the latest; None before it is up
    tasks    how many run there
    wanted   when it was last, on the clock of `time.monotonic`
    leaving  whether it is given back once no task runs there
    """

    def __init__(
        self,
        name: str,
        make_actor: MakeActor,
        exchange: Exchange,
        lock: threading.Lock,
        models: WeakSet[ModelInUse],
    ) -> None:
        self.name, self._make_actor, self._exchange = name, make_actor, exchange
        self._lock, self._models = lock, models
        self._actor: Actor | None = None
        self.status: Status | None = None
        self.up = self.leaving = False
        self.tasks = 0
        self.wanted = -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give up all tasks, and end the actor."""
        self._closed.set()
        if self._actor is not None:
            self._actor.kill()

    def join(self, seconds: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def given_back(self) -> bool:
        """Whether the cluster is not asked for the actor, as nothing is there for it to do."""
        return self._actor is None

    def ask_for(self, now: float) -> None:
        """Have an actor from now on."""
        self.wanted, self.leaving = now, False
        if self._actor is None and not self._closed.is_set():
            log.info("the cluster is asked for the worker %s", self.name)
            self._actor = self._make_actor()

    def give_back(self) -> None:
        """End the actor as soon as no task runs there."""
        with self._lock:
            self.leaving = self._actor is not None
            if self._actor is None or self.tasks:
                return
            actor, self._actor = self._actor, None
            self.up, self.leaving, self.status = False, False, None
        log.info("the worker %s is given back to the cluster", self.name)
        actor.kill()

    @property
    def problem(self) -> str | None:
        """Why the actor cannot be used, one sentence; None while it can, and where it was given back."""
        if self.up or self.given_back:
            return None
        if self.status is None:
            return f"The worker {self.name} of the cluster has not started; Ray may have no place for it."
        if self.status.problem:
            return f"The worker {self.name} of the cluster is on {self.status.host}: {self.status.problem}"
        return f"The worker {self.name} of the cluster does not answer; it was on {self.status.host}."

    def call(self, method: str, task: Task) -> Future[Any]:
        """Have a task done, which has a place here. The future raises WorkerLost if the process is gone or starts."""
        if self._actor is None:
            raise WorkerLost(f"{self.name} was given back")
        return self._actor.call(method, task)

    def progress(self, task: Task) -> Progress:
        """Return how far a task has come, as the latest status says."""
        return Progress() if self.status is None else self.status.progress.get(task.id, Progress())

    def give_up(self, future: Future[Any], task: Task) -> None:
        """Cancel a task, whether it has begun or not."""
        if self._actor is not None:
            self._actor.give_up(future)
            self._actor.call("cancel", task.id)

    def _loop(self) -> None:
        while not self._closed.wait(STATUS_SECONDS):
            self._exchange.renew()
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001 - the thread goes on, and asks again
                if self.up or not isinstance(error, WorkerLost):
                    log.warning("%s", self._lose(str(error)))

    def _ask(self) -> None:
        """Ask the actor for its state, and wait for the answer however long that takes. Raises what it raises."""
        actor = self._actor
        if actor is None:
            return
        future = actor.call("status", {model.identity for model in self._list_models()})
        if not self._await(future, actor):
            return
        status: Status = future.result()
        if status.problem is None and not self.up:
            log.info("the worker %s of the cluster is up on %s", self.name, status.host)
            # An actor that has begun anew has no models.
            for model in self._list_models():
                if model.actor == self.name:
                    actor.call("load", model.load_task())
        with self._lock:
            # Unless it was given back meanwhile.
            if actor is self._actor:
                self.status, self.up = status, status.problem is None

    def _await(self, future: Future[Any], actor: Actor) -> bool:
        """Wait for an answer; False once the actor was given back or this is closed."""
        deadline = time.monotonic() + SILENT_SECONDS
        while not wait([future], POLL_SECONDS).done:
            if self._closed.is_set() or actor is not self._actor:
                return False
            self._exchange.renew()
            if self.up and time.monotonic() > deadline:
                log.warning("%s", self._lose("does not answer"))
        return True

    def _list_models(self) -> list[ModelInUse]:
        with self._lock:
            return list(self._models)

    def _lose(self, reason: str) -> str:
        self.up = False
        return f"The worker {self.name} of the cluster is lost: {reason}"
