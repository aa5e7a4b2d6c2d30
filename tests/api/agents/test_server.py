"""Tests of the tools for agents, with the original client of the protocol and a server on a real socket."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeSegmenter, wait_until
from imagecodecs import png_decode
from live import STACK, LiveServer, as_tiff, eager_settings, serve
from paths import ROOT

from service.api.access.keys import hash_key
from service.api.agents.arguments import MAX_TABLE_ROWS
from service.api.app import create_app
from service.core.errors import ConfigError

httpx2 = pytest.importorskip("httpx2")
# An incomplete installation of the extra, in which the import fails, is an error.
if find_spec("mcp") is None:
    pytest.skip("needs the extra mcp", allow_module_level=True)
from mcp.client.client import Client  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

ADA, BOB = "stackseg_ada", "stackseg_bob"
SAMPLE = ROOT / "models" / "nuclei" / "sample.tif"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    scans = tmp_path_factory.mktemp("scans")
    (scans / "sample.tif").write_bytes(SAMPLE.read_bytes())
    settings = eager_settings(
        ROOT / "models",
        server={"mcp": True},
        access={"keys": {"ada": hash_key(ADA), "bob": hash_key(BOB)}},
        references={"inputs": {"scans": {"folder": scans, "keys": ["ada"]}}},
        device={"threads": 2},
    )
    with serve(settings) as running:
        yield running


def use(live: LiveServer, work: Callable[[Client], Awaitable[Any]], key: str = ADA, mode: Any = "auto") -> Any:
    """Connect a client with an API key, and return what `work` returns."""

    async def connect() -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http_client:
            transport = streamable_http_client(f"http://{live.host}:{live.port}/mcp", http_client=http_client)
            async with Client(transport, mode=mode) as client:
                return await work(client)

    return asyncio.run(connect())


def call(live: LiveServer, tool: str, key: str = ADA, /, **arguments: Any) -> Any:
    return use(live, lambda client: client.call_tool(tool, arguments), key)


def call_for_data(live: LiveServer, tool: str, key: str = ADA, /, **arguments: Any) -> dict[str, Any]:
    result = call(live, tool, key, **arguments)
    assert not result.is_error, result.content[0].text
    return dict(result.structured_content)


def read_picture(result: Any) -> Any:
    assert not result.is_error, result.content[0].text
    (picture,) = [part for part in result.content if part.type == "image"]
    assert picture.mime_type == "image/png"
    return png_decode(base64.b64decode(picture.data))


@pytest.fixture(scope="module")
def report(live: LiveServer) -> dict[str, Any]:
    """The report of a job on a file of the host."""
    report = call_for_data(live, "segment_stack", input="scans/sample.tif", channel=0, wait_seconds=45)
    while report["state"] not in {"done", "failed"}:
        report = call_for_data(live, "get_job", job=report["id"], wait_seconds=45)
    assert report["state"] == "done", report
    return report


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_are_described_to_clients_of_both_protocol_generations(live: LiveServer, mode: str) -> None:
    tools = {tool.name: tool for tool in use(live, lambda client: client.list_tools(), mode=mode).tools}
    assert {"list_models", "inspect_stack", "segment_stack", "get_job", "cancel_job"} < tools.keys()
    for tool in tools.values():
        assert all(schema.get("description") for schema in tool.input_schema["properties"].values()), tool.name
    assert tools["get_object_table"].input_schema["required"] == ["job"]
    assert tools["cancel_job"].annotations.destructive_hint
    assert tools["preview_stack"].annotations.read_only_hint


def test_models_and_stacks_are_described(live: LiveServer) -> None:
    models = call_for_data(live, "list_models")
    assert models["default"] == "nuclei"
    assert {model["name"] for model in models["models"]} >= {"nuclei", "membranes"}
    inspection = call_for_data(live, "inspect_stack", input="scans/sample.tif")
    assert inspection["file"]["axes"] == "ZYX"
    assert inspection["estimate"]["windows"] > 0


def test_job_has_the_objects_of_the_http_api(live: LiveServer, report: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {ADA}", "Content-Type": "image/tiff"}
    response = live.client.post("/segment", content=SAMPLE.read_bytes(), headers=headers)
    assert report["objects"] == int(response.headers["x-stackseg-objects"]) > 10
    assert report["id"] in {job["id"] for job in call_for_data(live, "list_jobs")["jobs"]}


def test_object_table_is_returned_in_parts_with_the_total(live: LiveServer, report: dict[str, Any]) -> None:
    labels, first = [], 1
    while first:
        text = call(live, "get_object_table", job=report["id"], first=first, rows=40).content[0].text
        statement, table = text.split("\n", 1)
        rows = list(csv.DictReader(io.StringIO(table)))
        assert len(rows) <= 40
        assert statement.startswith(f"Rows {first} to {first + len(rows) - 1} of {report['objects']}.")
        labels += [int(row["label"]) for row in rows]
        first = first + len(rows) if "next row" in statement else 0
    assert labels == list(range(1, report["objects"] + 1))


def test_previews_show_the_stack_and_outlines(live: LiveServer, report: dict[str, Any]) -> None:
    stack = read_picture(call(live, "preview_stack", input="scans/sample.tif", plane=20))
    result = read_picture(call(live, "preview_result", job=report["id"], plane=20))
    assert stack.shape == result.shape
    assert max(stack.shape) <= 768
    is_colored = np.ptp(result.astype(int), axis=-1) > 0
    assert not np.ptp(stack.astype(int), axis=-1).any()
    assert 0.01 < is_colored.mean() < 0.5
    assert np.array_equal(result[~is_colored], stack[~is_colored])


def test_uploaded_stacks_are_used_by_their_id(live: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {ADA}", "Content-Type": "image/tiff"}
    content = as_tiff(np.random.default_rng(0).integers(0, 1000, (4, 1000, 30), np.uint16))
    stack = live.client.post("/stacks", content=content, headers=headers).json()["id"]
    picture = call(live, "preview_stack", stack=stack)
    assert read_picture(picture).shape[:2] == (500, 15)
    assert picture.content[0].text.startswith("Plane 2 of planes 0 to 3 along Z, every 2 pixels")


def test_preview_shows_the_middle_plane_unless_it_is_almost_empty(live: LiveServer) -> None:
    noise = np.random.default_rng(0).integers(90, 110, (16, 24, 24), np.uint16)
    stacks = []
    for bright_planes in (slice(0, 16), slice(11, 16)):
        pixels = noise.copy()
        pixels[bright_planes, 8:16, 8:16] = 5000
        headers = {"Authorization": f"Bearer {ADA}", "Content-Type": "image/tiff"}
        stacks.append(str(live.client.post("/stacks", content=as_tiff(pixels), headers=headers).json()["id"]))
    planes = [
        call(live, "preview_stack", stack=stack, **arguments).content[0].text.partition(" of ")[0]
        for stack, arguments in ((stacks[0], {}), (stacks[1], {}), (stacks[1], {"plane": 8}))
    ]
    assert planes == ["Plane 8", "Plane 12", "Plane 8"]


@pytest.fixture(scope="module")
def series(live: LiveServer) -> str:
    """The id of an uploaded time series. Each of its five time points has another bright voxel."""
    pixels = np.random.default_rng(0).integers(0, 100, (5, 2, 48, 48), np.uint16)
    for number, pixels_at_time in enumerate(pixels):
        pixels_at_time[1, 8 * number : 8 * number + 8, :16] = 5000
    content = as_tiff(pixels, metadata={"axes": "TZYX"})
    headers = {"Authorization": f"Bearer {ADA}", "Content-Type": "image/tiff"}
    return str(live.client.post("/stacks", content=content, headers=headers).json()["id"])


@pytest.mark.parametrize(
    ("arguments", "shown", "note"),
    [
        ({}, 2, "Time point 2, the middle one of 0 to 4."),
        ({"time": "all"}, 2, "Time point 2, the middle one of 0 to 4."),
        ({"time": "3:5"}, 4, "Time point 4, the middle one of 3 to 4."),
        ({"time": 1}, 1, "Plane 1 of"),
    ],
)
def test_preview_of_a_series_shows_its_middle_time_point(
    live: LiveServer, series: str, arguments: dict[str, Any], shown: int, note: str
) -> None:
    result = call(live, "preview_stack", stack=series, **arguments)
    assert result.content[0].text.startswith(note)
    rows = np.flatnonzero(read_picture(result)[:, 0].max(axis=-1) > 128) // 10
    assert (rows.min(), rows.max()) == (8 * shown, 8 * shown + 7)


def test_preview_of_the_result_of_a_series_shows_its_middle_time_point(live: LiveServer, series: str) -> None:
    report = call_for_data(live, "segment_stack", stack=series, time="1:4", diameter="none", wait_seconds=45)
    assert report["state"] == "done", report
    middle = call(live, "preview_result", job=report["id"])
    assert middle.content[0].text.startswith("Time point 1, the middle one of 0 to 2.")
    pictures = [read_picture(call(live, "preview_result", job=report["id"], time=number)) for number in range(3)]
    assert [np.array_equal(read_picture(middle), picture) for picture in pictures] == [False, True, False]
    error = call(live, "preview_result", job=report["id"], time=3)
    assert error.structured_content["type"] == "urn:stackseg:problem:bad-parameter"


def test_waiting_calls_end_when_the_service_stops(bands_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "stack.tif").write_bytes(STACK)
    references = {"inputs": {"scans": {"folder": tmp_path}}}
    settings = eager_settings(bands_repository, server={"mcp": True}, references=references)
    arguments = {"input": "scans/stack.tif", "wait_seconds": 45}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    message["params"] = {"name": "segment_stack", "arguments": arguments}
    with ThreadPoolExecutor(1) as pool, serve(settings, load=FakeSegmenter) as running:
        fake = running.fake
        fake.gate.clear()
        # The original client would ask for the list of tools after the answer.
        url = f"http://{running.host}:{running.port}/mcp"
        headers = {"Accept": "application/json, text/event-stream"}
        answer = pool.submit(httpx2.post, url, json=message, headers=headers, timeout=60)
        wait_until(lambda: '"running"' in running.client.get("/jobs").text, 60)
        running.runtime.drain()
        report = answer.result(10).json()["result"]["structuredContent"]
        fake.gate.set()
    assert report["state"] == "running"


@pytest.mark.parametrize(
    ("tool", "arguments", "problem", "words"),
    [
        ("segment_stack", {}, "bad-parameter", "either `input`"),
        ("segment_stack", {"input": "scans/none.tif"}, "bad-parameter", "none.tif"),
        ("inspect_stack", {"input": "disk/none.tif"}, "bad-parameter", "scans"),
        ("inspect_stack", {"input": "https://example.org/a.zarr"}, "bad-parameter", "configured store"),
        ("segment_stack", {"input": "scans/sample.tif", "model": "none"}, "unknown-model", "nuclei"),
        ("segment_stack", {"input": "scans/sample.tif", "threshold": 2}, "bad-parameter", "threshold"),
        ("segment_stack", {"input": "scans/sample.tif", "wait_seconds": 1e6}, "bad-parameter", "45"),
        ("get_job", {"job": "none"}, "unknown-job", "job"),
        ("get_job", {"job": "none", "pixels": True}, "bad-parameter", "'pixels'"),
        ("get_object_table", {"job": "none", "rows": MAX_TABLE_ROWS + 1}, "bad-parameter", str(MAX_TABLE_ROWS)),
        ("preview_stack", {"input": "scans/sample.tif", "plane": 10**6}, "bad-parameter", "outside the volume"),
    ],
)
def test_errors_say_what_to_do(
    live: LiveServer, tool: str, arguments: dict[str, Any], problem: str, words: str
) -> None:
    result = call(live, tool, **arguments)
    assert result.is_error
    assert result.structured_content["type"] == f"urn:stackseg:problem:{problem}"
    assert words in result.content[0].text


def test_clients_have_the_permissions_of_their_key(live: LiveServer, report: dict[str, Any]) -> None:
    for tool in ("get_job", "cancel_job", "get_object_table", "preview_result"):
        result = call(live, tool, BOB, job=report["id"])
        assert (result.is_error, result.structured_content["type"]) == (True, "urn:stackseg:problem:unknown-job")
    assert call_for_data(live, "list_jobs", BOB) == {"jobs": []}
    assert call(live, "inspect_stack", BOB, input="scans/sample.tif").is_error


def test_cancelling_keeps_finished_jobs_and_stops_running_ones(live: LiveServer, report: dict[str, Any]) -> None:
    assert call_for_data(live, "cancel_job", job=report["id"])["state"] == "done"
    arguments = {"input": "scans/sample.tif", "quality": "best", "wait_seconds": 0}
    job = call_for_data(live, "segment_stack", **arguments)["id"]
    assert call_for_data(live, "cancel_job", job=job)["state"] == "cancelled"


def test_messages_pass_the_checks_of_the_service(live: LiveServer) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    headers = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {ADA}"}
    assert live.client.post("/mcp", json=message, headers=headers).status_code == 200
    assert live.client.post("/mcp", json=message, headers=headers | {"Authorization": "x"}).status_code == 401
    assert (
        live.client.post("/mcp", json=message, headers=headers | {"Origin": "https://evil.example"}).status_code == 403
    )
    assert live.client.post("/mcp", json=[message, message], headers=headers).status_code == 400
    assert live.client.post("/mcp", json=message | {"x": "x" * 2**18}, headers=headers).status_code == 413
    assert live.client.get("/mcp", headers=headers).status_code == 405


def test_unexpected_errors_reveal_no_details(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise LookupError("/srv/secret/folder")

    monkeypatch.setattr(live.runtime.models, "list_states", fail)
    result = call(live, "list_models")
    assert result.is_error
    assert result.structured_content["type"] == "urn:stackseg:problem:internal-error"
    assert "secret" not in result.model_dump_json()


def test_missing_extra_is_a_configuration_error(bands_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None stops the import, as for a missing package, also of a dependency.
    monkeypatch.setitem(sys.modules, "mcp.server.lowlevel", None)
    monkeypatch.delitem(sys.modules, "service.api.agents.server", raising=False)
    with pytest.raises(ConfigError, match=r"mcp\.server\.lowlevel.*stackseg\[mcp\]"):
        create_app(eager_settings(bands_repository, server={"mcp": True}))
