"""Tests of the service as a Ray Serve application, on a Ray cluster with one local node."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml
from fakes import wait_until
from live import as_tiff, eager_settings, read_classes, serve
from ray_clusters import START_TIMEOUT_SECONDS, ray_cluster, ray_environment
from starlette.responses import PlainTextResponse

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("aiohttp_cors") is None, reason="needs stackseg[ray-serve]"),
    # Ray itself causes these warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

REPLICAS = 2


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scratch folder that all replicas share."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def client(bands_repository: Path, scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    server = {"drain_seconds": 60, "scratch_folder": scratch}
    settings = eager_settings(bands_repository, server=server).model_dump(mode="json", exclude_unset=True)
    config = tmp_path_factory.mktemp("settings") / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    with ray_environment() as ray, ray_cluster(num_cpus=4) as cluster, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ray.init(address=cluster.address, log_to_driver=False)
        from ray import serve as ray_serve  # noqa: PLC0415

        from service.api.ray_serve import app  # noqa: PLC0415

        ray_serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        ray_serve.run(app({"config": str(config), "replicas": str(REPLICAS)}))
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http_client:
            yield http_client
        ray_serve.shutdown()


@pytest.fixture
def stack(phantom_maker: Any) -> bytes:
    return as_tiff(phantom_maker((64, 128, 128), seed=1).image)


@pytest.fixture
def expected(bands_repository: Path, stack: bytes) -> Any:
    with serve(eager_settings(bands_repository)) as local:
        return read_classes(local.segment(stack).content)


def segment(client: httpx2.Client, stack: bytes, **headers: str) -> httpx2.Response:
    return client.post("/segment", content=stack, headers={"Content-Type": "image/tiff", **headers})


def find_replicas() -> set[int]:
    """Return the process ids of the replicas that this test has started."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
            if title.startswith(b"ray::ServeReplica:default:stackseg") and is_descendant(int(process.name)):
                found.add(int(process.name))
        except OSError:
            continue
    return found


def is_descendant(pid: int) -> bool:
    """Return whether a process is a descendant of this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_replicas_are_ready_and_return_the_same_labels_as_other_services(
    client: httpx2.Client, stack: bytes, expected: Any
) -> None:
    assert client.get("/health/ready").json() == {"status": "ready"}
    with ThreadPoolExecutor(4) as pool:
        for response in pool.map(lambda _: segment(client, stack, Prefer="respond-async"), range(4)):
            assert np.array_equal(read_classes(response.content), expected)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/jobs"),
        ("GET", "/jobs/1"),
        ("POST", "/stacks"),
        ("DELETE", "/models/bands"),
        ("POST", "/models/reload"),
    ],
)
def test_requests_for_resources_of_one_replica_are_rejected(client: httpx2.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert (response.status_code, "one replica" in response.text) == (501, True)


def test_requests_with_a_route_prefix_are_rejected_too() -> None:
    from service.api.ray_serve import ReplicaLocalRequestFilter  # noqa: PLC0415

    async def get_status(path: str) -> int:
        app = ReplicaLocalRequestFilter(PlainTextResponse("accepted"))
        transport = httpx2.ASGITransport(app, root_path="/prefix")
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            return (await client.post(path)).status_code

    assert [asyncio.run(get_status(f"/prefix/{name}")) for name in ("jobs", "models/reload", "segment")] == [
        501,
        501,
        200,
    ]


def test_models_are_listed(client: httpx2.Client) -> None:
    assert [model["name"] for model in client.get("/models").json()["models"]] == ["bands"]


def test_killed_replica_is_replaced(client: httpx2.Client, stack: bytes, expected: Any) -> None:
    old_replicas = find_replicas()
    assert len(old_replicas) == REPLICAS
    os.kill(min(old_replicas), signal.SIGKILL)
    wait_until(
        lambda: len(find_replicas() - old_replicas) == 1 and len(find_replicas()) == REPLICAS, START_TIMEOUT_SECONDS
    )
    with ThreadPoolExecutor(4) as pool:
        for response in pool.map(lambda _: segment(client, stack), range(4)):
            assert np.array_equal(read_classes(response.content), expected)


def test_running_requests_finish_when_the_application_is_deleted(
    client: httpx2.Client, scratch: Path, phantom_maker: Any
) -> None:
    from ray import serve as ray_serve  # noqa: PLC0415

    large = as_tiff(phantom_maker((128, 256, 256), seed=2).image)
    with ThreadPoolExecutor(2 * REPLICAS) as pool:
        responses = [pool.submit(segment, client, large) for _ in range(2 * REPLICAS)]
        # Requests that have not reached a replica would be rejected after the deletion.
        wait_until(lambda: len(list(scratch.glob("*/requests/*"))) == len(responses), START_TIMEOUT_SECONDS)
        ray_serve.delete("default")
        assert [response.result().status_code for response in responses] == [200] * len(responses)
    wait_until(lambda: not find_replicas(), START_TIMEOUT_SECONDS)
