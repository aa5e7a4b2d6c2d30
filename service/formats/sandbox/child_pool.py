"""Pool of child processes that read files, in which a process reads the files of only one client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from service.formats.sandbox.child_process import ReaderProcess


class ChildPool:
    """Child processes that are used by one thread at a time. Thread-safe.

    Args:
        children: all processes of the pool
        prestarted_count: number of processes that start immediately; the others start when more clients send files
    """

    def __init__(self, children: Sequence[ReaderProcess], prestarted_count: int) -> None:
        self._children = children
        # Idle processes and the times since which they have been idle.
        self._idle_children: dict[ReaderProcess, float] = {}
        self._condition = threading.Condition()
        for child in children[:prestarted_count]:
            child.restart()
        for child in children:
            self._release(child)

    @contextmanager
    def borrow(self, client: str | None) -> Iterator[ReaderProcess]:
        """Wait for an idle process that can read files of a client, and yield it.

        A process that has already read files of this client is preferred. If no unused process remains, start another
        one in advance for the next client.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._idle_children)
            child = self._choose(client)
            spare_child = None if child.has_client(client) else self._take_spare_child()
        try:
            if spare_child is not None:
                # If the process cannot start now, the next caller tries again and gets the error.
                with suppress(OSError):
                    spare_child.restart()
                self._release(spare_child)
            yield child
        finally:
            self._release(child)

    def wait_for_all(self) -> None:
        """Wait until all processes are idle."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._idle_children) == len(self._children))

    def _choose(self, client: str | None) -> ReaderProcess:
        """Remove a process from the idle ones. The condition must be held."""

        def rank(child: ReaderProcess) -> tuple[bool, bool, bool, float]:
            return not child.has_client(client), not child.is_unused, not child.is_started, self._idle_children[child]

        child = min(self._idle_children, key=rank)
        del self._idle_children[child]
        return child

    def _take_spare_child(self) -> ReaderProcess | None:
        """Remove a process that has never been started, unless an unused one is idle. The condition must be held."""
        if any(child.is_started and child.is_unused for child in self._idle_children):
            return None
        spare_child = next((child for child in self._idle_children if not child.is_started), None)
        if spare_child is not None:
            del self._idle_children[spare_child]
        return spare_child

    def _release(self, child: ReaderProcess) -> None:
        with self._condition:
            self._idle_children[child] = time.monotonic()
            self._condition.notify_all()
