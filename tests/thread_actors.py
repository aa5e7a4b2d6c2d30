"""Fakes of cluster actors that run in threads of the test process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from live import eager_settings

from service.core.config import Settings
from service.core.errors import DeviceLost
from service.serving.devices.cluster.actor import WorkerLost
from service.serving.devices.cluster.device_actor import DeviceActor, make_actor_settings
from service.serving.devices.cluster.exchange import Outcome
from service.serving.devices.local.model import Segmenter, load_model


def make_cluster_settings(folder: Path, shared: Path, **sections: Any) -> Settings:
    """Return settings of a service with two workers in a cluster and this shared folder."""
    cluster = {"address": "nowhere:1", "workers": 2, "shared_folder": shared, **sections.pop("cluster", {})}
    limits = {"waiting": 100, **sections.pop("limits", {})}
    return eager_settings(folder, cluster=cluster, limits=limits, **sections)


def make_device_actor(settings: Settings, load: Any = Segmenter) -> ThreadActor:
    """Return an actor that owns the device of these settings."""
    return ThreadActor(lambda: DeviceActor(make_actor_settings(settings), partial(load_model, load)))


class UnresponsiveActor:
    """An actor that never answers, like one that the cluster cannot place on a node."""

    def call(self, *_: Any) -> Future[Any]:
        return Future()

    def cancel_call(self, _future: Future[Any]) -> None:
        pass

    def kill(self) -> None:
        pass


class ThreadActor:
    """An actor that calls its object in threads of this process.

    `lose` fails the pending calls and all later ones. `restart` restarts the actor with a new object.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.device = make()
        self.lost = False
        # Number of following segmentations that fail with DeviceLost.
        self.remaining_device_failures = 0
        # Name of a method whose calls fail because the actor is lost.
        self.failing_method = ""
        self.killed = threading.Event()
        self._pending: set[Future[Any]] = set()
        self._called_methods: list[str] = []
        self._pool = ThreadPoolExecutor(32)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.lost or self.killed.is_set() or method == self.failing_method:
            answer.set_exception(WorkerLost("The actor is lost."))
            return answer
        if method == "segment" and self.remaining_device_failures:
            self.remaining_device_failures -= 1
            answer.set_result(Outcome(error=DeviceLost("cuda:0 has failed.")))
            return answer
        self._called_methods.append(method)
        self._pending.add(answer)
        self._pool.submit(getattr(self.device, method), *arguments).add_done_callback(
            lambda done: self._forward_result(answer, done)
        )
        return answer

    def _forward_result(self, answer: Future[Any], done: Future[Any]) -> None:
        if answer in self._pending:
            self._pending.discard(answer)
            answer.set_exception(done.exception()) if done.exception() else answer.set_result(done.result())

    def was_called(self, method: str) -> bool:
        return method in self._called_methods

    def lose(self) -> None:
        self.lost = True
        while self._pending:
            self._pending.pop().set_exception(WorkerLost("The actor is lost."))

    def restart(self) -> None:
        self.device = self._make()
        self.lost = False

    def cancel_call(self, future: Future[Any]) -> None:
        pass

    def kill(self) -> None:
        self.killed.set()
