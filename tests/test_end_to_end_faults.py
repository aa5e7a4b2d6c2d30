"""End-to-end tests of device faults, with server processes that have two simulated devices each.

A server that loses a device still answers requests, and then exits.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import faulty_server
import httpx2
import pytest
from bands import make_phantom
from fakes import wait_until
from live import ServiceRequests, as_tiff, parse_problem

from service.serving.devices.local.watchdog import EXIT_STATUS

TIMEOUT_SECONDS = 60
# Every server is forked from a process that has already imported the modules.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["faulty_server"])


class Server(ServiceRequests):
    """A process that runs `faulty_server.serve`."""

    def __init__(self, models: Path, folder: Path, grace: float) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._port, port = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=faulty_server.serve, args=(models, self.faults, port, grace))
        self.process.start()

    def wait_ready(self) -> None:
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self._port.recv()}", timeout=TIMEOUT_SECONDS)
        wait_until(lambda: self.client.get("/health/ready").status_code == 200, TIMEOUT_SECONDS)

    def segment_on_first(self, stack: bytes, **parameters: Any) -> httpx2.Response:
        """Wait until all devices are idle, so that the first device computes the request. Then send it."""
        wait_until(lambda: not any(device["running"] for device in self.client.get("/gpu").json()["devices"]))
        return self.segment(stack, **parameters)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Inject a fault into the first device until the context exits."""
        (self.faults / name).touch()
        yield
        (self.faults / name).unlink()

    def assert_exits(self) -> None:
        """Assert that the process exits on its own."""
        self.process.join(TIMEOUT_SECONDS)
        assert self.process.exitcode == EXIT_STATUS

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.client.close()


@pytest.fixture(scope="module")
def servers(
    bands_repository: Path, random_nuclei: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """One server for each way to lose a device: `request`, `idle` and `load`. All start concurrently."""
    folder = tmp_path_factory.mktemp("faults")
    models = folder / "models"
    shutil.copytree(bands_repository, models)
    shutil.copytree(random_nuclei.folder, models / random_nuclei.name)
    with ExitStack() as stack:
        # Grace time in seconds. In `request`, the other device must be able to finish its requests.
        servers = {"request": 2.0, "idle": 0.1, "load": 0.1}
        running = {name: Server(models, folder / name, grace) for name, grace in servers.items()}
        for server in running.values():
            stack.callback(server.stop)
        for server in running.values():
            server.wait_ready()
        yield running


@pytest.fixture(scope="module")
def stack() -> bytes:
    return as_tiff(make_phantom((16, 40, 40), seed=1).image)


def assert_recovers_from_out_of_memory(server: Server, stack: bytes) -> None:
    """Assert that out-of-memory errors reduce the batch size or fail the request, but not the next request."""
    with server.fault("no-memory"):
        answer = server.segment_on_first(stack)
        assert answer.status_code == 200, answer.text
        assert "did not fit in memory" in str(answer.headers)
    with server.fault("no-room"):
        assert parse_problem(server.segment_on_first(stack)) == (507, "out-of-memory")
    answer = server.segment_on_first(stack)
    assert answer.status_code == 200
    assert "did not fit in memory" not in str(answer.headers)


def test_request_that_breaks_its_device_fails_and_the_server_exits(servers: dict[str, Server], stack: bytes) -> None:
    server = servers["request"]
    assert_recovers_from_out_of_memory(server, stack)
    (server.faults / "break").touch()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.segment(stack), range(4)))
    # The other device answers requests until the process exits.
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert parse_problem(next(answer for answer in answers if answer.status_code != 200)) == (503, "device-lost")
    server.assert_exits()


def test_next_request_detects_a_device_that_broke_while_idle(servers: dict[str, Server], stack: bytes) -> None:
    server = servers["idle"]
    assert_recovers_from_out_of_memory(server, stack)
    (server.faults / "broken").touch()
    assert parse_problem(server.segment_on_first(stack)) == (503, "device-lost")
    server.assert_exits()


def test_device_that_breaks_while_loading_a_model_is_reported_as_lost(servers: dict[str, Server], stack: bytes) -> None:
    server = servers["load"]
    with server.fault("no-room-load"):
        assert parse_problem(server.segment_on_first(stack, model="random-nuclei")) == (507, "out-of-memory")
        assert server.segment(stack).status_code == 200
    (server.faults / "break-load").touch()
    assert parse_problem(server.segment_on_first(stack, model="random-nuclei")) == (503, "device-lost")
    server.assert_exits()
