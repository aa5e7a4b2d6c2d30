"""Whether one client can keep another waiting: python benchmarks/starve.py [--seconds 30] [--attack NAME ...].

A real server with keys for two clients. During each attack by the one, the other inspects and segments a small stack of
one window, again and again. Prints a line for each attack: median, 99th percentile and longest time of both, in
seconds. Exits with status 1 where the other is answered with anything but 200, or later than within 2 s (inspect) and
10 s (segment) at the 99th percentile.

An attack is a context manager that takes the port, begins, and has ended when its block ends.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import yaml
from common import make_bomb, make_model, make_tiff, request, run_server

from service.api.access.keys import hash_key
from service.api.http.listener import limit_connections

LIMITS = {"/inspect": 2.0, "/segment": 10.0}
STACK = make_tiff((16, 32, 32), 0)[0]
CLIENTS = 32
# As many as a service takes that may have the usual 1,024 files open.
CONNECTIONS = 512

Attack = Callable[[int], AbstractContextManager[object]]


def begin(port: int, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """Send a request as the attacker, of which `length` bytes of the body are announced; return the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: attacker\r\nContent-Length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@contextmanager
def repeat(step: Callable[[], None], clients: int = CLIENTS) -> Iterator[None]:
    """Have many threads do one step again and again; broken connections are part of it."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            with suppress(OSError):
                step()

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def decode_gigabytes(port: int) -> AbstractContextManager[None]:
    """Files of few bytes and gigabytes of pixels, whose senders hang up after a second."""
    bombs = [make_bomb(100, (4096, 8192), compression) for compression in ("zlib", "lzw", "zstd", "jpeg")]
    bodies = iter(bombs * 10_000)

    def step() -> None:
        with begin(port, "/segment?axes=ZYX", next(bodies)):
            time.sleep(1)

    return repeat(step)


def decode_megabytes(port: int) -> AbstractContextManager[None]:
    """Files that decode to just what counts as small, of more windows than one volume may take."""
    body = make_bomb(1, (4096, 8192))

    def step() -> None:
        with begin(port, "/segment?axes=YX&overlap=0.75", body) as connection:
            connection.recv(1000)

    return repeat(step)


def parse_pages(port: int) -> AbstractContextManager[None]:
    """Files of very many pages."""
    body = make_bomb(300_000, (1, 1))

    def step() -> None:
        with begin(port, "/inspect?axes=ZYX", body) as connection:
            connection.recv(1000)

    return repeat(step)


def submit_gigabytes(port: int) -> AbstractContextManager[None]:
    """Jobs with files of few bytes and gigabytes of pixels."""
    body = make_bomb(64, (4096, 8192))

    def step() -> None:
        with begin(port, "/jobs?axes=ZYX", body) as connection:
            connection.recv(1000)

    return repeat(step, 4)


def fill_queue(port: int) -> AbstractContextManager[None]:
    """Jobs and requests of minutes of work, and more of them than may wait."""
    body, paths = make_tiff((64, 256, 256), 1)[0], iter(("/jobs", "/segment") * 100_000)

    def step() -> None:
        with begin(port, next(paths), body) as connection:
            connection.recv(1000)

    return repeat(step)


@contextmanager
def stall_uploads(port: int) -> Iterator[None]:
    """Uploads that announce more than the service has room for, and stall."""
    with ExitStack() as connections:
        for _ in range(2 * CLIENTS):
            with suppress(OSError):
                connections.enter_context(begin(port, "/segment", bytes(2**22), 2**32 - 1))
        yield


@contextmanager
def leave_results(port: int) -> Iterator[None]:
    """Requests whose results nobody takes."""
    body = make_tiff((16, 512, 512), 1)[0]

    def step() -> None:
        connections.enter_context(begin(port, "/segment", body))

    with ExitStack() as connections, repeat(step, 1):
        yield


def hold_connections(port: int, sent: bytes = b"", more: bytes = b"") -> AbstractContextManager[None]:
    """Far more connections than there may be, which send nothing, or this at first and then more each second.

    They read nothing, and their system takes little for them. Those that are closed are opened again.
    """

    def connect() -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        return connection

    def step() -> None:
        with ExitStack() as held:
            connections = [held.enter_context(connect()) for _ in range(3 * CONNECTIONS // CLIENTS)]
            for _ in range(5):
                time.sleep(1)
                for connection in connections:
                    with suppress(OSError):
                        connection.sendall(more)

    return repeat(step)


def drip_heads(port: int) -> AbstractContextManager[None]:
    """As many, which send a letter of a head per second."""
    return hold_connections(port, b"POST /segment HTTP/1.1\r\nHost: x\r\nX-Long: ", b"x")


def drip_bodies(port: int) -> AbstractContextManager[None]:
    """As many, without a key, which send a letter of a body per second."""
    return hold_connections(port, b"POST /segment HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b"x")


def leave_answers(port: int) -> AbstractContextManager[None]:
    """As many, which ask for a page of more than a megabyte."""
    return hold_connections(port, b"GET /docs/page.js HTTP/1.1\r\nHost: x\r\n\r\n")


def misname_parameters(port: int) -> AbstractContextManager[None]:
    """Requests with thousands of parameters that there are not."""
    path = "/segment?" + "&".join(f"p{number}=" for number in range(8500))

    def step() -> None:
        with begin(port, path, STACK) as connection:
            connection.recv(1000)

    return repeat(step)


def send_ahead(port: int) -> AbstractContextManager[None]:
    """Connections that send more requests ahead than are taken, and read what is answered."""

    def step() -> None:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(40 * b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            while connection.recv(2**20):
                pass

    return repeat(step)


ATTACKS: dict[str, Attack] = {
    "nothing": lambda _: nullcontext(),
    **{attack.__name__: attack for attack in (
        decode_gigabytes, decode_megabytes, parse_pages, submit_gigabytes, fill_queue, stall_uploads, leave_results,
        hold_connections, drip_heads, drip_bodies, leave_answers, misname_parameters, send_ahead,
    )},
}  # fmt: skip


class Times:
    """How long one kind of request took; `wrong` has the answers that were not 200."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds: list[float] = []
        self.wrong: list[str] = []

    def take(self, port: int) -> None:
        began = time.perf_counter()
        status, answer = request(port, "POST", self.path, STACK, {"X-API-Key": "other"})
        self.seconds.append(time.perf_counter() - began)
        if status != 200:
            self.wrong.append(f"{status} {answer[:200].decode(errors='replace')}")

    @property
    def missed(self) -> bool:
        return bool(self.wrong) or self._percentile(0.99) > LIMITS[self.path]

    def __str__(self) -> str:
        figures = f"{self._percentile(0.5):.3f}, {self._percentile(0.99):.3f}, {max(self.seconds):.3f}"
        wrong = f"; {len(self.wrong)} refused: {self.wrong[0]}" if self.wrong else ""
        return f"{self.path} {figures} ({len(self.seconds)} times{wrong})"

    def _percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def measure(port: int, seconds: float) -> list[Times]:
    """Inspect and segment in turn for so many seconds, and each at least once."""
    times = [Times(path) for path in LIMITS]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in times:
            one.take(port)
        time.sleep(0.02)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--attack", choices=ATTACKS, action="append")
    options = parser.parse_args()
    limit_connections(3 * CONNECTIONS)
    missed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "models")
        config = folder / "config.yaml"
        sections = {
            "models": {"folder": str(folder / "models")},
            "engine": {"kind": "eager"},
            "access": {"keys": {key: hash_key(key) for key in ("attacker", "other")}},
            "limits": {"cache_bytes": 0, "windows": 500_000},
            "server": {"scratch_folder": name, "connections": CONNECTIONS},
        }
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        for attack in options.attack or ATTACKS:
            # A server of its own, so that each attack meets the same one.
            with run_server(folder, "--config", str(config)) as (_, port):
                measure(port, 1.0)
                with ATTACKS[attack](port):
                    time.sleep(1.0)
                    times = measure(port, options.seconds)
            missed = missed or any(one.missed for one in times)
            print(f"{attack}: {'; '.join(map(str, times))}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
