"""The interface of request bodies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Body(Protocol):
    """A request body that can be read several times, for retries.

    name    file name that the server shows; "" if unknown
    nbytes  size in bytes
    """

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def read_blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content in blocks."""
