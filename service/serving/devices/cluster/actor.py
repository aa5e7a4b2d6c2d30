"""The interface of an actor handle. An actor is a process on another host that owns a device or processes blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

ProgressCallback = Callable[[int, int], None]
"""Function called with the number of completed windows and the total number of windows."""

ActorFactory = Callable[[], "Actor"]
"""Function that requests an actor from the cluster. The actor may not have started when the handle is returned."""


class WorkerLost(Exception):
    """An actor or its host has failed. The same call may succeed later, or on another actor."""


class Actor(Protocol):
    """A handle to a `DeviceActor` or `BlockActor` in another process. If the process ends, the cluster restarts it."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method. The future raises WorkerLost if the process has ended or is starting."""

    def cancel_call(self, future: Future[Any]) -> None:
        """Cancel a call that has not started."""

    def kill(self) -> None:
        """Terminate the process and do not restart it."""
