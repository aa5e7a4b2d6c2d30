"""Tests of service.api.messages.results: the response with a result."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.api.messages.results import build_response
from service.serving.results.metadata import ResultMetadata

METADATA = ResultMetadata("bands/1", "image/tiff", "stack_labels.ome.tif", "labels", {"total": 0.25})


@pytest.mark.parametrize("length", [0, 10, 2**20])
def test_response_from_memory_equals_response_from_disk(tmp_path: Path, length: int) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(bytes(range(256)) * (length // 256) + bytes(length % 256))
    content, status = path.read_bytes(), path.stat()
    streamed = TestClient(build_response(path, METADATA)).post("/")
    path.unlink()
    from_memory = TestClient(build_response(path, METADATA, content, status)).post("/")
    assert from_memory.content == streamed.content
    assert len(from_memory.content) == length
    assert from_memory.headers == streamed.headers


def test_resources_are_released_after_the_response(tmp_path: Path) -> None:
    path, released = tmp_path / "labels.ome.tif", list[str]()
    path.write_bytes(b"labels")
    response = build_response(path, METADATA, path.read_bytes())
    response.resources.callback(released.append, "resource")
    assert TestClient(response).post("/").content == b"labels"
    assert released == ["resource"]
