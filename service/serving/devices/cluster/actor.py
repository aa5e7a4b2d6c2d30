"""A handle of an actor: a process of another host that owns a device or does blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Advance = Callable[[int, int], None]
"""Called with the windows that are done and their total."""

MakeActor = Callable[[], "Actor"]
"""Asks the cluster for an actor, which need not be there yet."""


class WorkerLost(Exception):
    """An actor or its host has failed; the same call may succeed there later, or elsewhere now."""


class Actor(Protocol):
    """A handle of a `DeviceActor` or `BlockActor` in another process, which the cluster restarts wherever it ends."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method; the future raises WorkerLost where the process is gone or starts."""

    def give_up(self, future: Future[Any]) -> None:
        """Let a call not begin if it has not begun."""

    def kill(self) -> None:
        """End the process for good."""
