"""Real server processes with two simulated devices each: where one is lost, requests are answered and they end."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import faulty_server
import httpx2
import pytest
from conftest import make_phantom
from fakes import until
from live import as_tiff

from service.serving.watchdog import EXIT_STATUS

SECONDS = 60
# A process that has imported everything once, and is forked for each server.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["faulty_server"])


class Server:
    """A process that serves models as `faulty_server` does."""

    def __init__(self, models: Path, folder: Path) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self._port, port = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=faulty_server.serve, args=(models, self.faults, port))
        self.process.start()

    def wait_ready(self) -> None:
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self._port.recv()}", timeout=SECONDS)
        until(lambda: self.client.get("/health/ready").status_code == 200, SECONDS)

    def segment(self, stack: bytes, **parameters: Any) -> httpx2.Response:
        return self.client.post("/segment", content=stack, params=parameters, headers={"Content-Type": "image/tiff"})

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
    """A server for each way to lose a device; they start at the same time."""
    folder = tmp_path_factory.mktemp("faults")
    models = folder / "models"
    shutil.copytree(bands_repository, models)
    shutil.copytree(random_nuclei.folder, models / random_nuclei.name)
    with ExitStack() as stack:
        running = {name: Server(models, folder / name) for name in ("request", "idle", "load")}
        for server in running.values():
            stack.callback(server.stop)
        for server in running.values():
            server.wait_ready()
        yield running


@pytest.fixture(scope="module")
def stack() -> bytes:
    return as_tiff(make_phantom((16, 40, 40), seed=1).image)


def assert_lost(answer: httpx2.Response) -> None:
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:stackseg:problem:device-lost")


def test_request_that_breaks_its_device_is_refused_and_one_without_memory_takes_fewer_windows(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["request"]
    fault = server.faults / "no-memory"
    fault.touch()
    answer = server.segment(stack)
    assert answer.status_code == 200, answer.text
    assert "fewer were taken" in str(answer.headers)
    fault.unlink()
    assert "fewer were taken" not in str(server.segment(stack).headers)
    (server.faults / "break").touch()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.segment(stack), range(4)))
    # The other device goes on until the process ends.
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert_lost(next(answer for answer in answers if answer.status_code != 200))
    server.assert_ended()


def test_device_that_broke_while_it_was_idle_is_found_by_the_next_request(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["idle"]
    (server.faults / "broken").touch()
    assert_lost(server.segment(stack))
    server.assert_ended()


def test_device_that_breaks_while_a_model_is_loaded_is_no_fault_of_the_model(
    servers: dict[str, Server], stack: bytes
) -> None:
    server = servers["load"]
    (server.faults / "break-load").touch()
    assert_lost(server.segment(stack, model="random-nuclei"))
    server.assert_ended()
