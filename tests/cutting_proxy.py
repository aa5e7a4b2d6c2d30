"""A TCP proxy that cuts connections in the middle of a response."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


class CuttingProxy:
    """Forwards connections to a server.

    cut_after  for each of the first connections: number of bytes of responses after which it is cut
    """

    def __init__(self, host: str, port: int, cut_after: Sequence[int]) -> None:
        self._server, self._cut_after = (host, port), list(cut_after)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0

    def run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                limit = self._cut_after.pop(0) if self._cut_after else None
                self.connections += 1
                upstream = socket.create_connection(self._server)
                threading.Thread(target=_pump, args=(client, upstream, None), daemon=True).start()
                threading.Thread(target=_pump, args=(upstream, client, limit), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    """Forward bytes until the source closes or the limit is reached, and then close both connections."""
    with suppress(OSError), source, target:
        while data := source.recv(2**16):
            target.sendall(data if limit is None else data[:limit])
            limit = None if limit is None else limit - len(data)
            if limit is not None and limit <= 0:
                break
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_connections(host: str, port: int, *cut_after: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(host, port, cut_after)
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()
