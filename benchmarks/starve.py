"""Measure how much one client can slow down another.

python benchmarks/starve.py [--seconds 30] [--attack NAME ...]

Runs a real server with API keys for two clients. While the attacker runs each attack, the other client repeatedly
inspects and segments a small stack of one window. Prints a line for each attack with the median, the 99th percentile
and the maximum of the seconds of both requests. The exit status is 1 if a request of the other client fails, or if its
99th percentile exceeds 2 s (inspect) or 10 s (segment).

An attack is a function from the server's port to a context manager, and lasts as long as the `with` block.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import yaml
from common import make_bomb, make_model, make_tiff, request, run_server

from service.api.access.keys import hash_key
from service.api.http.listener import raise_open_file_limit

# Maximum 99th percentile of the seconds of each request.
LIMITS = {"/inspect": 2.0, "/segment": 10.0}
STACK = make_tiff((16, 32, 32), 0)[0]
CLIENTS = 32
# Maximum number of connections of a service with the usual limit of 1,024 open files.
CONNECTIONS = 512

Attack = Callable[[int], AbstractContextManager[object]]


def send_request(port: int, path: str, body: bytes, length: int | None = None) -> socket.socket:
    """Send a request as the attacker; return the connection. `length` overrides the Content-Length of the body."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    headers = f"Host: localhost\r\nX-API-Key: attacker\r\nContent-Length: {length or len(body)}"
    head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@contextmanager
def repeat(step: Callable[[], None], clients: int = CLIENTS) -> Iterator[None]:
    """Repeat a step in many threads until the block ends, ignoring broken connections."""
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
    """Send small files that decode to gigabytes, and disconnect after a second."""
    bombs = [make_bomb(100, (4096, 8192), compression) for compression in ("zlib", "lzw", "zstd", "jpeg")]
    bodies = iter(bombs * 10_000)

    def step() -> None:
        with send_request(port, "/segment?axes=ZYX", next(bodies)):
            time.sleep(1)

    return repeat(step)


def decode_megabytes(port: int) -> AbstractContextManager[None]:
    """Send files whose decoded size, 32 MiB, just counts as small, but which have more windows than allowed."""
    body = make_bomb(1, (4096, 8192))

    def step() -> None:
        with send_request(port, "/segment?axes=YX&overlap=0.75", body) as connection:
            connection.recv(1000)

    return repeat(step)


def parse_pages(port: int) -> AbstractContextManager[None]:
    """Send files with 300,000 pages."""
    body = make_bomb(300_000, (1, 1))

    def step() -> None:
        with send_request(port, "/inspect?axes=ZYX", body) as connection:
            connection.recv(1000)

    return repeat(step)


def submit_gigabytes(port: int) -> AbstractContextManager[None]:
    """Submit jobs with small files that decode to gigabytes."""
    body = make_bomb(64, (4096, 8192))

    def step() -> None:
        with send_request(port, "/jobs?axes=ZYX", body) as connection:
            connection.recv(1000)

    return repeat(step, 4)


def fill_queue(port: int) -> AbstractContextManager[None]:
    """Send jobs and requests that take minutes, more than the queue can hold."""
    body, paths = make_tiff((64, 256, 256), 1)[0], iter(("/jobs", "/segment") * 100_000)

    def step() -> None:
        with send_request(port, next(paths), body) as connection:
            connection.recv(1000)

    return repeat(step)


@contextmanager
def stall_uploads(port: int) -> Iterator[None]:
    """Start uploads that announce more bytes than the service has room for, and stall them."""
    with ExitStack() as connections:
        for _ in range(2 * CLIENTS):
            with suppress(OSError):
                connections.enter_context(send_request(port, "/segment", bytes(2**22), 2**32 - 1))
        yield


@contextmanager
def leave_results(port: int) -> Iterator[None]:
    """Send requests and never read the results."""
    body = make_tiff((16, 512, 512), 1)[0]

    def step() -> None:
        connections.enter_context(send_request(port, "/segment", body))

    with ExitStack() as connections, repeat(step, 1):
        yield


def hold_connections(port: int, sent: bytes = b"", more: bytes = b"") -> AbstractContextManager[None]:
    """Open three times as many connections as allowed, and send nothing.

    With `sent`, each connection sends these bytes first; with `more`, it sends these bytes every second. Responses are
    not read, and the receive buffers are small. Closed connections are reopened.
    """

    def connect() -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        return connection

    def step() -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(connect()) for _ in range(3 * CONNECTIONS // CLIENTS)]
            for _ in range(5):
                time.sleep(1)
                for connection in connections:
                    with suppress(OSError):
                        connection.sendall(more)

    return repeat(step)


def drip_heads(port: int) -> AbstractContextManager[None]:
    """Like `hold_connections`, but send one byte of the request head per second."""
    return hold_connections(port, b"POST /segment HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"x")


def drip_bodies(port: int) -> AbstractContextManager[None]:
    """Like `hold_connections`, but send a request head without an API key, then one byte of the body per second."""
    return hold_connections(port, b"POST /segment HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n", b"x")


def leave_answers(port: int) -> AbstractContextManager[None]:
    """Like `hold_connections`, but request a file of more than a megabyte, and never read the response."""
    return hold_connections(port, b"GET /docs/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n")


def misname_parameters(port: int) -> AbstractContextManager[None]:
    """Send requests with thousands of unknown parameters."""
    path = "/segment?" + "&".join(f"p{number}=" for number in range(8500))

    def step() -> None:
        with send_request(port, path, STACK) as connection:
            connection.recv(1000)

    return repeat(step)


def send_ahead(port: int) -> AbstractContextManager[None]:
    """Pipeline more requests on each connection than the service accepts, and read the responses."""

    def step() -> None:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(40 * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while connection.recv(2**20):
                pass

    return repeat(step)


def upload(port: int, body: bytes) -> str:
    """Upload a stack as the attacker, and return its id. The previous attack may have filled the attacker's queue."""
    while (response := request(port, "POST", "/stacks", body, {"X-API-Key": "attacker"}))[0] == 503:
        time.sleep(0.5)
    status, content = response
    if status != 201:
        raise OSError(f"{status} {content[:200]!r}")
    return str(json.loads(content)["id"])


def send_get(port: int, path: str) -> socket.socket:
    """Send a GET request as the attacker; return the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: attacker\r\n\r\n".encode())
    return connection


def repeat_gets(port: int, paths: Iterable[str]) -> AbstractContextManager[None]:
    """Request these paths in turn, and read the beginning of each response."""
    endless_paths = itertools.cycle(paths)

    def step() -> None:
        with send_get(port, next(endless_paths)) as connection:
            connection.recv(1000)

    return repeat(step)


def view_huge_planes(port: int) -> AbstractContextManager[None]:
    """Request a few pixels of planes of half a gigabyte."""
    stacks = [upload(port, make_bomb(1, (16_384, 32_768))) for _ in range(4)]
    return repeat_gets(port, [f"/stacks/{stack}/planes?axes=YX&step=1,9999,9999" for stack in stacks])


def view_many_volumes(port: int) -> AbstractContextManager[None]:
    """View thousands of time points, each of which is a volume of its own."""
    stack = upload(port, make_bomb(3000, (8, 8), "none"))
    return repeat_gets(port, [f"/stacks/{stack}/planes?axes=TYX&time={time}" for time in range(3000)])


def view_across_planes(port: int) -> AbstractContextManager[None]:
    """Request planes perpendicular to 300,000 stored planes, and disconnect after a second."""
    stack = upload(port, make_bomb(300_000, (8, 8), "none"))

    def step() -> None:
        with send_get(port, f"/stacks/{stack}/planes?axes=ZYX&axis=x&to=1"):
            time.sleep(1)

    return repeat(step)


@contextmanager
def leave_planes(port: int) -> Iterator[None]:
    """Request as many bytes of planes as possible, and do not read them."""
    stack = upload(port, make_bomb(32, (1024, 1024), "none"))
    with ExitStack() as connections:
        for _ in range(2 * CLIENTS):
            connections.enter_context(send_get(port, f"/stacks/{stack}/planes?axes=ZYX"))
        yield


def search_folders(port: int) -> AbstractContextManager[None]:
    """Search a folder with 20,000 files for a pattern with dozens of recursive components."""
    path = f"/jobs?input=tree&output_to=results/none&glob={14 * '**/*b*/'}*.tif"

    def step() -> None:
        with send_request(port, path, b"") as connection:
            connection.recv(1000)

    return repeat(step)


def store_tiny_stacks(port: int) -> AbstractContextManager[None]:
    """Store stacks of one byte."""

    def step() -> None:
        with send_request(port, "/stacks", b"x") as connection:
            connection.recv(1000)

    return repeat(step)


ATTACKS: dict[str, Attack] = {
    "nothing": lambda _: nullcontext(),
    **{attack.__name__: attack for attack in (
        decode_gigabytes, decode_megabytes, parse_pages, submit_gigabytes, fill_queue, stall_uploads, leave_results,
        hold_connections, drip_heads, drip_bodies, leave_answers, misname_parameters, send_ahead, view_huge_planes,
        view_many_volumes, view_across_planes, leave_planes, search_folders, store_tiny_stacks,
    )},
}  # fmt: skip


def make_tree(folder: Path) -> None:
    """Create 20,000 empty files in 200 nested and sibling folders."""
    for number in range(200):
        parent = folder.joinpath(*(f"ab{level}" for level in range(number % 20)), f"b{number}")
        parent.mkdir(parents=True)
        for file_number in range(100):
            (parent / f"{file_number}.txt").touch()


class Latencies:
    """Seconds of the requests to one path; `failures` has the responses with a status other than 200."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def measure_request(self, port: int) -> None:
        """Send one request as the other client, and record its time."""
        began = time.perf_counter()
        status, content = request(port, "POST", self.path, STACK, {"X-API-Key": "other"})
        self.seconds.append(time.perf_counter() - began)
        if status != 200:
            self.failures.append(f"{status} {content[:200].decode(errors='replace')}")

    @property
    def exceeds_limits(self) -> bool:
        """Whether a request failed, or the 99th percentile is above the limit."""
        return bool(self.failures) or self._percentile(0.99) > LIMITS[self.path]

    def __str__(self) -> str:
        seconds = f"{self._percentile(0.5):.3f}, {self._percentile(0.99):.3f}, {max(self.seconds):.3f}"
        failures = f"; {len(self.failures)} failed: {self.failures[0]}" if self.failures else ""
        return f"{self.path} {seconds} ({len(self.seconds)} requests{failures})"

    def _percentile(self, quantile: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


def measure(port: int, seconds: float) -> list[Latencies]:
    """Send inspect and segment requests alternately for `seconds`, each at least once; return their latencies."""
    results = [Latencies(path) for path in LIMITS]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for latencies in results:
            latencies.measure_request(port)
        time.sleep(0.02)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--attack", choices=ATTACKS, action="append")
    options = parser.parse_args()
    raise_open_file_limit(3 * CONNECTIONS)
    has_failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "models")
        config, tree = folder / "config.yaml", folder / "tree"
        make_tree(tree)
        sections = {
            "models": {"folder": str(folder / "models")},
            "engine": {"kind": "eager"},
            "access": {"keys": {key: hash_key(key) for key in ("attacker", "other")}},
            "limits": {"cache_bytes": 0, "windows": 500_000},
            "server": {"scratch_folder": name, "connections": CONNECTIONS},
            "references": {"inputs": {"tree": str(tree)}, "outputs": {"results": name}},
        }
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        for attack in options.attack or ATTACKS:
            # Start a new server for each attack, so that attacks do not influence each other.
            with run_server(folder, "--config", str(config)) as (_, port):
                measure(port, 1.0)
                with ATTACKS[attack](port):
                    time.sleep(1.0)
                    results = measure(port, options.seconds)
            has_failed = has_failed or any(latencies.exceeds_limits for latencies in results)
            print(f"{attack}: {'; '.join(map(str, results))}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
