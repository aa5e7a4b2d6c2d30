"""Readers in child processes, for tests of what they read and of what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.formats.sandbox.reader import Reader


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Selections up to 256 MiB; several children."""
    with Reader(memory_bytes=2**29, seconds=30, decoded_bytes=2**28) as reader:
        yield reader


@pytest.fixture
def taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """taken_over(expression, seconds=20) -> a reader whose only child sends the bytes of this as every reply."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ExitStack() as readers:

        def make(reply: str, seconds: float = 20) -> Reader:
            (tmp_path / "lying.py").write_text(
                "import socket\nchannel = socket.socket(fileno=0)\nchannel.sendall(b'{\"missing\": {}}\\n')\n"
                f"while channel.recv(2**16):\n    channel.sendall({reply})\n",
                encoding="ascii",
            )
            lying = Reader(memory_bytes=2**29, seconds=seconds, decoded_bytes=2**28, processes=1, module="lying")
            return readers.enter_context(lying)

        yield make
