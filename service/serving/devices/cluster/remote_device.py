"""Actors of a cluster as the service sees them: how many it asks for, which are up, and what runs where."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Protocol

from service.core.buffers import make_allocator
from service.core.config import Cluster, Settings
from service.core.errors import Cancelled, DeviceLost, Interrupted
from service.core.hardware import Driver
from service.core.types import Options, Volume
from service.inference.batching.window_request import Share
from service.inference.runner.estimator import Estimator
from service.inference.types import EngineReport, PlannedRequest, Result, Sizing
from service.models.spec import ModelSpec
from service.serving.devices.cluster.exchange import Exchange, Loaded, Outcome, Segmented, Status, Task
from service.serving.devices.job import Progress

# How often an actor is asked for its state, and after how many seconds without an answer its tasks run elsewhere.
STATUS_SECONDS, SILENT_SECONDS = 0.5, 20.0
# How often a task looks whether it was cancelled, and whether its actor is up.
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)

Advance = Callable[[int, int], None]
MakeActor = Callable[[], "Actor"]


class WorkerLost(Exception):
    """An actor or its host has failed; the same call may succeed there later, or elsewhere now."""


class Actor(Protocol):
    """A handle of a `DeviceActor` in another process, which the cluster starts anew wherever it ends."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method; the future raises WorkerLost where the process is gone or starts."""

    def give_up(self, future: Future[Any]) -> None:
        """Let a call not begin if it has not begun."""

    def kill(self) -> None:
        """End the process for good."""


class _GoesOn(Exception):
    """A task that has not begun goes to a device that has nothing to do, where it has a place already."""

    def __init__(self, device: RemoteDevice) -> None:
        self.device = device


class RemoteDevices:
    """All actors that this service may have, with the folder through which they get pixels.

    make_actor  asks the cluster for an actor, which need not be there yet
    attempts    how often a task is begun whose actors die
    unfinished  how many tasks run, and wait for an actor
    """

    def __init__(self, exchange: Exchange, make_actor: MakeActor, cluster: Cluster, attempts: int) -> None:
        self.exchange, self._attempts = exchange, attempts
        self._least, self._idle_seconds = cluster.least, cluster.idle_seconds
        self.lock = threading.Lock()
        self.devices = [RemoteDevice(f"ray-{number}", make_actor, self) for number in range(1, cluster.workers + 1)]
        self._segmenters: weakref.WeakSet[RemoteSegmenter] = weakref.WeakSet()
        self.unfinished = 0
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex[:8]
        self.adjust(0)

    def adjust(self, wanted: int) -> None:
        """Ask the cluster for so many actors, and give back those beyond them that were not wanted for a while.

        Those that are up are kept rather than those that are awaited, and these rather than others.
        """
        now = time.monotonic()
        order = sorted(self.devices, key=lambda device: (not device.up, device.given_back))
        for number, device in enumerate(order, 1):
            if number <= max(wanted, self._least):
                device.ask_for(now)
            elif now - device.wanted > self._idle_seconds:
                device.give_back()

    @property
    def segmenters(self) -> list[RemoteSegmenter]:
        """All that are in use."""
        with self.lock:
            return list(self._segmenters)

    def add(self, segmenter: RemoteSegmenter) -> None:
        """Have the model of a segmenter stay in the actors as long as it is in use."""
        with self.lock:
            self._segmenters.add(segmenter)

    def next_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def take(self, preferred: RemoteDevice, lost: Collection[RemoteDevice]) -> RemoteDevice | None:
        """Return the device that a task runs on, if any is up, and count it there.

        One that stays comes first, then one where it was not lost before, the preferred one, and the least busy.
        """

        def rank(device: RemoteDevice) -> tuple[bool, bool, bool, int]:
            return device.leaving, device in lost, device is not preferred, device.tasks

        with self.lock:
            device = min((device for device in self.devices if device.up), key=rank, default=None)
            if device is not None:
                device.tasks += 1
            return device

    def take_idle(self, busy: RemoteDevice) -> RemoteDevice | None:
        """Return a device with nothing to do for a task of one that has others, and count it there."""
        with self.lock:
            idle = (device for device in self.devices if device.up and not device.leaving and not device.tasks)
            device = next(idle, None) if busy.tasks > 1 else None
            if device is not None:
                device.tasks += 1
            return device

    def run(
        self, preferred: RemoteDevice, method: str, task: Task, cancelled: Callable[[], bool], advance: Advance
    ) -> Outcome:
        """Do a task on the preferred device, or another where that is not up or is lost.

        Raises Cancelled, Interrupted where as many actors were lost as are tried, and the error of the task.
        """
        self._count(1)
        try:
            return self._run(preferred, method, task, cancelled, advance)
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self.lock:
            self.unfinished += more

    def _run(
        self, preferred: RemoteDevice, method: str, task: Task, cancelled: Callable[[], bool], advance: Advance
    ) -> Outcome:
        lost: list[RemoteDevice] = []
        chosen: RemoteDevice | None = None
        while len(lost) < self._attempts:
            if (device := chosen or self.take(preferred, lost)) is None:
                if cancelled():
                    raise Cancelled("given up before a worker of the cluster was there")
                time.sleep(POLL_SECONDS)
                continue
            chosen = None
            try:
                # An actor refuses a task that was cancelled there, as one is with which it was lost.
                return device.attempt(method, task._replace(id=self.next_id()), cancelled, advance)
            except _GoesOn as error:
                chosen = error.device
            except WorkerLost as error:
                log.warning("%s was lost with a request, which begins again: %s", device.name, error)
                lost.append(device)
            finally:
                with self.lock:
                    device.tasks -= 1
        raise Interrupted(f"{len(lost)} workers of the cluster have ended while they did this; memory is likely short.")


class RemoteDevice:
    """One actor, if the cluster was asked for it, and what is known of it.

    A thread asks for its state, from `start` to `close`.

    status   the latest; None before it is up
    tasks    how many run there
    wanted   when it was last, on the clock of `time.monotonic`
    leaving  whether it is given back once no task runs there
    """

    def __init__(self, name: str, make_actor: MakeActor, all_devices: RemoteDevices) -> None:
        self.name, self._make_actor, self._all = name, make_actor, all_devices
        self._actor: Actor | None = None
        self.status: Status | None = None
        self.up = self.leaving = False
        self.tasks = 0
        self.wanted = -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="cluster", daemon=True)

    # What a device worker wants of its threads.

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def pulse(self) -> None:
        """Nothing: an actor has a watchdog of its own."""

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
    def exchange(self) -> Exchange:
        return self._all.exchange

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
        with self._all.lock:
            self.leaving = self._actor is not None
            if self._actor is None or self.tasks:
                return
            actor, self._actor = self._actor, None
            self.up, self.leaving, self.status = False, False, None
        log.info("the worker %s is given back to the cluster", self.name)
        actor.kill()

    @property
    def problem(self) -> str | None:
        """Why the device cannot be used, one sentence; None while it can, and where it was given back."""
        if self.up or self.given_back:
            return None
        if self.status is None:
            return f"The worker {self.name} of the cluster has not started; Ray may have no place for it."
        if self.status.problem:
            return f"The worker {self.name} of the cluster is on {self.status.host}: {self.status.problem}"
        return f"The worker {self.name} of the cluster does not answer; it was on {self.status.host}."

    def run(  # noqa: PLR0913
        self,
        method: str,
        task: Task,
        *,
        cancelled: Callable[[], bool],
        progress: Advance,
        share: Callable[[Share], None] = lambda _share: None,
        due: float = 0.0,  # noqa: ARG002 - the actor's own queue orders tasks
    ) -> Any:
        """Do a task here, or elsewhere while this device is not up, and return its value.

        Raises what `RemoteDevices.run` raises.
        """
        outcome = self._all.run(self, method, task, lambda: cancelled() or self._closed.is_set(), progress)
        if outcome.error is not None:
            raise outcome.error
        if outcome.share.seconds:
            share(outcome.share)
        if windows := outcome.share.windows:
            progress(windows, windows)
        return outcome.value

    def attempt(self, method: str, task: Task, cancelled: Callable[[], bool], advance: Advance) -> Outcome:
        """Do a task here once, where it has a place. Raises WorkerLost, Cancelled and _GoesOn."""
        actor = self._actor
        assert actor is not None  # noqa: S101 - it is not given back while a task has a place
        future = actor.call(method, task)
        try:
            return self._wait(future, task, cancelled, advance)
        except (Cancelled, WorkerLost, _GoesOn) as error:
            if isinstance(error, WorkerLost):
                self.up = False
            actor.give_up(future)
            actor.call("cancel", task.id)
            raise

    def _wait(self, future: Future[Any], task: Task, cancelled: Callable[[], bool], advance: Advance) -> Outcome:
        told = Progress()
        while not wait([future], POLL_SECONDS).done:
            if cancelled():
                raise Cancelled("given up while it ran in the cluster")
            if not self.up:
                raise WorkerLost(f"{self.name} does not answer")
            done = (self.status and self.status.progress.get(task.id)) or Progress()
            if done.total and done != told:
                told = done
                advance(*done)
            if task.volume and not done.total and (idle := self._all.take_idle(self)):
                raise _GoesOn(idle)
        outcome: Outcome = future.result()
        if isinstance(outcome.error, DeviceLost):
            raise WorkerLost(str(outcome.error))
        return outcome

    def _loop(self) -> None:
        while not self._closed.wait(STATUS_SECONDS):
            self.exchange.renew()
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001 - the thread goes on, and asks again
                if self.up or not isinstance(error, WorkerLost):
                    log.warning("%s", self._lost(str(error)))

    def _ask(self) -> None:
        """Ask the actor for its state, and wait for the answer however long that takes. Raises what it raises."""
        actor = self._actor
        if actor is None:
            return
        future = actor.call("status", {segmenter.model for segmenter in self._all.segmenters})
        deadline = time.monotonic() + SILENT_SECONDS
        while not wait([future], POLL_SECONDS).done:
            if self._closed.is_set() or actor is not self._actor:
                return
            self.exchange.renew()
            if self.up and time.monotonic() > deadline:
                log.warning("%s", self._lost("does not answer"))
        status: Status = future.result()
        if status.problem is None and not self.up:
            log.info("the worker %s of the cluster is up on %s", self.name, status.host)
            self._load_models(actor)
        with self._all.lock:
            # Unless it was given back meanwhile.
            if actor is self._actor:
                self.status, self.up = status, status.problem is None

    def _load_models(self, actor: Actor) -> None:
        """Have an actor that has begun anew load the models that this service has loaded there."""
        for segmenter in self._all.segmenters:
            if segmenter.device is self:
                actor.call("load", segmenter.task())

    def _lost(self, reason: str) -> str:
        self.up = False
        return f"The worker {self.name} of the cluster is lost: {reason}"


class RemoteSegmenter:
    """A model in an actor, with the methods of `Segmenter` that a device worker calls.

    model  name of the model among all versions of all models
    """

    def __init__(
        self, device: RemoteDevice, devices: RemoteDevices, spec: ModelSpec, settings: Settings, _driver: Driver
    ) -> None:
        self.spec = spec
        facts = f"{spec.model_dump_json()} {spec.folder}"
        self.model = f"{spec.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
        self.device, self._devices = device, devices
        self._allocate = make_allocator(settings.server.scratch_folder)
        self._loaded: Loaded
        devices.add(self)

    @property
    def estimator(self) -> Estimator:
        return self._loaded.estimator

    @property
    def nbytes(self) -> int:
        return self._loaded.nbytes

    def report(self) -> EngineReport:
        return self._loaded.report

    def warm_up(self, *, tune: bool = False) -> None:  # noqa: ARG002 - workers do not race
        """Load the model in the actor, which loads it again by itself where it was started anew."""
        self._loaded = self.device.run("load", self.task(), cancelled=lambda: False, progress=lambda *_: None)

    def task(self) -> Task:
        """Return the task to load the model."""
        return Task(self._devices.next_id(), self.model, self.spec)

    def segment(  # noqa: PLR0913
        self,
        volume: Volume,
        options: Options,
        *,
        request: PlannedRequest | None,
        cancelled: Callable[[], bool],
        progress: Advance,
        run: Callable[..., Any],
        revised: object,  # noqa: ARG002 - the actor's queue minds the memory
    ) -> Result:
        """Segment a volume as `Segmenter.segment` does, by `run` of the device.

        Raises what that raises, OutOfStorage, StorageUnavailable and Interrupted.
        """
        planned = request or self.estimator.plan_request(volume, options)
        with self._devices.exchange.lend(volume) as stored:
            task = self.task()._replace(volume=stored, options=options, windows=planned.estimate.windows)
            segmented: Segmented = run("segment", task, cancelled=cancelled, progress=progress)
            # A copy of the spec, as it comes from there, is another one to whoever compares them.
            return segmented.open(self._allocate)._replace(spec=self.spec)

    def estimate_diameter(
        self, volume: Volume, options: Options, *, cancelled: Callable[[], bool], run: Callable[..., Any]
    ) -> Sizing | None:
        """Estimate the width of objects as `Segmenter.estimate_diameter` does, by `run` of the device."""
        with self._devices.exchange.lend(volume) as stored:
            task = self.task()._replace(volume=stored, options=options)
            sizing: Sizing | None = run("estimate_diameter", task, cancelled=cancelled, progress=lambda *_: None)
            return sizing
