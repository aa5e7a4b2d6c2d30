"""Readers with child processes, for tests that read or reject files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.formats.sandbox.reader import Reader


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Return a reader with several child processes that accepts selections up to 256 MiB."""
    with Reader(memory_bytes=2**29, time_limit_seconds=30, max_decoded_bytes=2**28) as reader:
        yield reader


@pytest.fixture
def make_compromised_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """make_compromised_reader(expression, seconds=20): make a reader whose only child replies with this expression."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ExitStack() as readers:

        def make_reader(reply: str, seconds: float = 20) -> Reader:
            (tmp_path / "compromised.py").write_text(
                "import socket\ncontrol = socket.socket(fileno=0)\n"
                "while descriptors := socket.recv_fds(control, 1, 1)[1]:\n"
                "    channel = socket.socket(fileno=descriptors[0])\n"
                "    channel.sendall(b'{\"missing\": {}}\\n')\n"
                f"    while channel.recv(2**16):\n        channel.sendall({reply})\n",
                encoding="ascii",
            )
            compromised = Reader(
                memory_bytes=2**29,
                time_limit_seconds=seconds,
                max_decoded_bytes=2**28,
                process_count=1,
                module="compromised",
            )
            return readers.enter_context(compromised)

        yield make_reader
