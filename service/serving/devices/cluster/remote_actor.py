"""One actor as the service sees it: whether it was asked for, whether it is up, and the tasks that run there."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, Protocol

from service.core.errors import Cancelled, DeviceLost
from service.serving.devices.cluster.actor import Actor, Advance, MakeActor, WorkerLost
from service.serving.devices.cluster.exchange import Outcome, Status, Task
from service.serving.devices.queue.job import Progress

# How often an actor is asked for its state, and after how many seconds without an answer its tasks run elsewhere.
STATUS_SECONDS = 0.5
SILENT_SECONDS = 20.0
# How often a task looks whether it was cancelled, and whether its actor is up.
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """A task on its way to an actor, with the calls of its job."""

    method: str
    task: Task
    cancelled: Callable[[], bool]
    advance: Advance


class MovedElsewhere(Exception):
    """A task that has not begun goes to an actor that has nothing to do, where it has a place already."""

    def __init__(self, actor: RemoteActor) -> None:
        self.actor = actor


class Peers(Protocol):
    """What an actor needs of all others: `ActorPool`."""

    @property
    def lock(self) -> threading.Lock:
        """Held while tasks are counted and actors are given back."""

    def take_idle(self, busy: RemoteActor) -> RemoteActor | None:
        """Return an actor with nothing to do for a task of one that has others, and count it there."""

    def load_tasks(self, actor: RemoteActor) -> list[Task]:
        """Return the tasks that load the models which this service has loaded in an actor."""

    def models_in_use(self) -> set[str]:
        """Return the names of all models that actors have to keep."""

    def renew_exchange(self) -> None:
        """Mark the shared folder as in use."""


class RemoteActor:
    """One actor, if the cluster was asked for it, and what is known of it.

    A thread asks for its state, from `start` to `close`.

    status   the latest; None before it is up
    tasks    how many run there
    wanted   when it was last, on the clock of `time.monotonic`
    leaving  whether it is given back once no task runs there
    """

    def __init__(self, name: str, make_actor: MakeActor, peers: Peers) -> None:
        self.name, self._make_actor, self._peers = name, make_actor, peers
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
        with self._peers.lock:
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

    def attempt(self, attempt: Attempt) -> Outcome:
        """Do a task here once, where it has a place. Raises WorkerLost, Cancelled and MovedElsewhere."""
        actor = self._actor
        if actor is None:
            raise WorkerLost(f"{self.name} was given back")
        future = actor.call(attempt.method, attempt.task)
        try:
            return self._wait(future, attempt)
        except (Cancelled, WorkerLost, MovedElsewhere) as error:
            if isinstance(error, WorkerLost):
                self.up = False
            actor.give_up(future)
            actor.call("cancel", attempt.task.id)
            raise

    def _wait(self, future: Future[Any], attempt: Attempt) -> Outcome:
        task, reported = attempt.task, Progress()
        while not wait([future], POLL_SECONDS).done:
            if attempt.cancelled():
                raise Cancelled("given up while it ran in the cluster")
            if not self.up:
                raise WorkerLost(f"{self.name} does not answer")
            done = (self.status and self.status.progress.get(task.id)) or Progress()
            if done.total and done != reported:
                reported = done
                attempt.advance(*done)
            if task.volume and not done.total and (idle := self._peers.take_idle(self)):
                raise MovedElsewhere(idle)
        outcome: Outcome = future.result()
        if isinstance(outcome.error, DeviceLost):
            raise WorkerLost(str(outcome.error))
        return outcome

    def _loop(self) -> None:
        while not self._closed.wait(STATUS_SECONDS):
            self._peers.renew_exchange()
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
        future = actor.call("status", self._peers.models_in_use())
        deadline = time.monotonic() + SILENT_SECONDS
        while not wait([future], POLL_SECONDS).done:
            if self._closed.is_set() or actor is not self._actor:
                return
            self._peers.renew_exchange()
            if self.up and time.monotonic() > deadline:
                log.warning("%s", self._lose("does not answer"))
        status: Status = future.result()
        if status.problem is None and not self.up:
            log.info("the worker %s of the cluster is up on %s", self.name, status.host)
            # An actor that has begun anew has no models.
            for task in self._peers.load_tasks(self):
                actor.call("load", task)
        with self._peers.lock:
            # Unless it was given back meanwhile.
            if actor is self._actor:
                self.status, self.up = status, status.problem is None

    def _lose(self, reason: str) -> str:
        self.up = False
        return f"The worker {self.name} of the cluster is lost: {reason}"
