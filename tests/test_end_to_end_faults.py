"""Real server processes with two simulated devices each: where one is lost, requests are answered and they end."""

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
from fakes import until
from live import ServiceRequests, as_tiff, problem

from service.serving.devices.local.watchdog import EXIT_STATUS

SECONDS = 60
# A process that has imported everything once, and is forked for each server.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["faulty_server"])


class Server(ServiceRequests):
    """A process that serves models as `faulty_server` does."""

    def __init__(self, models: Path, folder: Path, grace: float) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._port, port = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=faulty_server.serve, args=(models, self.faults, port, grace))
        self.process.start()

    def wait_ready(self) -> None:
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self._port.recv()}", timeout=SECONDS)
        until(lambda: self.client.get("/health/ready").status_code == 200, SECONDS)

    def segment_on_first(self, stack: bytes, **parameters: Any) -> httpx2.Response:
        """The first device answers, as long as nothing else has it work."""
        until(lambda: not any(device["running"] for device in self.client.get("/gpu").json()["devices"]))
        return self.segment(stack, **parameters)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """The first device has a fault for a while."""
        (self.faults / name).touch()
        yield
        (self.faults / name).unlink()

    def assert_ended(self) -> None:
        """The process ends by itself."""
        self.process.join(SECONDS)
        assert self.process.exitcode == EXIT_STATUS

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.client.close()


@pytest.fixture(scope="module")
def servers(
    bands_repository: Path, random_nuclei: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """A server for each way to lose a device, that of `idle` without waiting for it; they start at the same time."""
    folder = tmp_path_factory.mktemp("faults")
    models = folder / "models"
    shutil.copytree(bands_repository, models)
    shutil.copytree(random_nuclei.folder, models / random_nuclei.name)
    with ExitStack() as stack:
        # The other device has time to answer what it has begun.
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


def assert_survives_without_memory(server: Server, stack: bytes) -> None:
    """A request takes fewer windows at once, or is refused; the next one is answered as ever."""
    with server.fault("no-memory"):
        answer = server.segment_on_first(stack)
        assert answer.status_code == 200, answer.text
        assert "fewer were taken" in str(answer.headers)
    with server.fault("no-room"):
        assert problem(server.segment_on_first(stack)) == (507, "out-of-memory")
    answer = server.segment_on_first(stack)
    assert answer.status_code == 200
    assert "fewer were taken" not in str(answer.headers)


def test_request_that_breaks_its_device_is_refused_and_one_without_memory_takes_fewer_windows(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["request"]
    assert_survives_without_memory(server, stack)
    (server.faults / "break").touch()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.segment(stack), range(4)))
    # The other device goes on until the process ends.
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert problem(next(answer for answer in answers if answer.status_code != 200)) == (503, "device-lost")
    server.assert_ended()


def test_device_that_broke_while_it_was_idle_is_found_by_the_next_request(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["idle"]
    assert_survives_without_memory(server, stack)
    (server.faults / "broken").touch()
    assert problem(server.segment_on_first(stack)) == (503, "device-lost")
    server.assert_ended()


def test_device_that_breaks_while_a_model_is_loaded_is_no_fault_of_the_model(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["load"]
    with server.fault("no-room-load"):
        assert problem(server.segment_on_first(stack, model="random-nuclei")) == (507, "out-of-memory")
        assert server.segment(stack).status_code == 200
    (server.faults / "break-load").touch()
    assert problem(server.segment_on_first(stack, model="random-nuclei")) == (503, "device-lost")
    server.assert_ended()
