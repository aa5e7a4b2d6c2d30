"""Seconds by stage of one request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager


class Stages:
    """Seconds that each stage of one request took, in the order in which they happened."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the request began."""
        return time.perf_counter() - self._began

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Time the block as stage `name`."""
        return _StageTimer(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to stage `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def update(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of several stages."""
        for name, value in seconds.items():
            self.add(name, value)


class _StageTimer(AbstractContextManager[None]):
    """Timer of one block; `contextlib.contextmanager` takes longer than some of the blocks."""

    __slots__ = ("_began", "_name", "_stages")

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stages.add(self._name, time.perf_counter() - self._began)
