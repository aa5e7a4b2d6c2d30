"""HTTP responses from other hosts that must arrive within a time limit."""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import Any

# Time limit for receiving one object, including its headers and all interim responses.
OBJECT_TIMEOUT_SECONDS = 60.0
# Time limit for connecting, and for each part of a response.
RESPONSE_TIMEOUT_SECONDS = 10.0


class LimitedResponse(http.client.HTTPResponse):
    """A response that must be complete within `OBJECT_TIMEOUT_SECONDS`.

    Reading raises TimeoutError after the time limit. Otherwise, a server could send interim responses or headers
    forever, because the timeout of a socket applies only to the next bytes.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_DeadlineReader(self.fp.detach(), sock, OBJECT_TIMEOUT_SECONDS))


class _DeadlineReader(io.RawIOBase):
    """A stream that reads from a socket until a deadline."""

    def __init__(self, raw: io.RawIOBase, connection_socket: socket.socket, seconds: float) -> None:
        self._raw, self._socket, self._deadline = raw, connection_socket, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer. Raises TimeoutError."""
        remaining_seconds = self._deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError
        self._socket.settimeout(min(RESPONSE_TIMEOUT_SECONDS, remaining_seconds))
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        """Close the stream."""
        self._raw.close()
        super().close()
