"""Processes that fork readers, kept for the next service of the same test session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from service.formats.sandbox.child_process import ReaderProcess, make_child_environment
from service.formats.sandbox.reader import Reader
from service.serving.storage import readers

# Number of idle processes that are kept. Each uses 20 MB.
MAX_IDLE = 4

Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]


class IdleProcesses:
    """Processes of closed readers. The processes that they forked have ended, so they have no data of any file."""

    def __init__(self) -> None:
        self._processes: list[tuple[Key, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def take(self, child: ReaderProcess) -> Any:
        """Let a child adopt a process that was started with the same arguments and environment, if there is one."""
        key = _make_key(child)
        with self._lock:
            index = next((index for index, (other, _) in enumerate(self._processes) if other == key), None)
            if index is None:
                return None
            _, fields = self._processes.pop(index)
        vars(child).update(fields)
        child._error_output.seek(0)
        child._error_output.truncate()
        return fields["_process"]

    def keep(self, child: ReaderProcess) -> None:
        """Keep the process of a child that no thread uses. The child then has no process."""
        if not child.is_started or child._has_ended():
            return
        child._fork_files.close()
        fields = {name: vars(child)[name] for name in ("_process", "_control", "_error_output", "_files")}
        child._process, child._files = None, ExitStack()
        with self._lock:
            self._processes.append((_make_key(child), fields))
        self.shrink(MAX_IDLE)

    def shrink(self, count: int) -> None:
        """End the oldest processes until `count` remain."""
        while len(self._processes) > count:
            with self._lock:
                _, fields = self._processes.pop(0)
            fields["_files"].close()
            fields["_process"].wait(20)


def _make_key(child: ReaderProcess) -> Key:
    return tuple(child._arguments), frozenset(make_child_environment().items())


@contextmanager
def share_reader_processes() -> Iterator[None]:
    """Let services that run one after another share the processes that fork readers.

    Starting such a process takes 0.2 s of CPU time, and a service starts two. As for a new client, the process forks a
    new one for the next service.
    """
    idle, start = IdleProcesses(), ReaderProcess._start

    class SharingReader(Reader):
        def close(self) -> None:
            with self._pool._condition:
                for child in self._pool._idle_children:
                    idle.keep(child)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReaderProcess, "_start", lambda child: idle.take(child) or start(child))
        patch.setattr(readers, "Reader", SharingReader)
        yield
    idle.shrink(0)
