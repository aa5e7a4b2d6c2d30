"""Actors of a cluster in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from live import eager

from service.core.config import Settings
from service.core.errors import DeviceLost
from service.serving.devices.cluster.actor import WorkerLost
from service.serving.devices.cluster.device_actor import DeviceActor, actor_settings
from service.serving.devices.cluster.exchange import Outcome
from service.serving.devices.local.model import Segmenter, load_model


def remote(folder: Path, shared: Path, **sections: Any) -> Settings:
    cluster = {"address": "nowhere:1", "workers": 2, "shared_folder": shared, **sections.pop("cluster", {})}
    limits = {"waiting": 100, **sections.pop("limits", {})}
    return eager(folder, cluster=cluster, limits=limits, **sections)


def make_device_actor(settings: Settings, load: Any = Segmenter) -> ThreadActor:
    return ThreadActor(lambda: DeviceActor(actor_settings(settings), partial(load_model, load)))


class SilentActor:
    """An actor that never answers, as one for which the cluster has no place."""

    def call(self, *_: Any) -> Future[Any]:
        return Future()

    def give_up(self, _future: Future[Any]) -> None:
        pass

    def kill(self) -> None:
        pass


class ThreadActor:
    """An actor of this process. While it is lost, calls fail, those that wait for it too; then it begins anew."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.device = make()
        self.lost = False
        # How many segmentations find that the device has failed.
        self.lost_devices = 0
        # Method whose calls find that the actor is gone.
        self.lose_at = ""
        self.killed = threading.Event()
        self._waiting: set[Future[Any]] = set()
        self._asked: list[str] = []
        self._pool = ThreadPoolExecutor(32)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.lost or self.killed.is_set() or method == self.lose_at:
            answer.set_exception(WorkerLost("gone"))
            return answer
        if method == "segment" and self.lost_devices:
            self.lost_devices -= 1
            answer.set_result(Outcome(error=DeviceLost("cuda:0 has failed.")))
            return answer
        self._asked.append(method)
        self._waiting.add(answer)
        self._pool.submit(getattr(self.device, method), *arguments).add_done_callback(
            lambda done: self._settle(answer, done)
        )
        return answer

    def _settle(self, answer: Future[Any], done: Future[Any]) -> None:
        if answer in self._waiting:
            self._waiting.discard(answer)
            answer.set_exception(done.exception()) if done.exception() else answer.set_result(done.result())

    def asked(self, method: str) -> bool:
        return method in self._asked

    def lose(self) -> None:
        self.lost = True
        while self._waiting:
            self._waiting.pop().set_exception(WorkerLost("gone"))

    def come_back(self) -> None:
        self.device = self._make()
        self.lost = False

    def give_up(self, future: Future[Any]) -> None:
        pass

    def kill(self) -> None:
        self.killed.set()
