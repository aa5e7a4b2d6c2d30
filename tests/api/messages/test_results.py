"""Tests of service.api.messages.results: what is sent for a result."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.api.messages.results import build_response
from service.serving.results.metadata import AnswerMetadata

OUTCOME = AnswerMetadata("bands/1", "image/tiff", "stack_labels.ome.tif", "labels", {"total": 0.25})


@pytest.mark.parametrize("length", [0, 10, 2**20])
def test_an_answer_is_the_same_whether_its_bytes_are_at_hand_or_not(tmp_path: Path, length: int) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(bytes(range(256)) * (length // 256) + bytes(length % 256))
    content, status = path.read_bytes(), path.stat()
    streamed = TestClient(build_response(path, OUTCOME)).post("/")
    path.unlink()
    at_once = TestClient(build_response(path, OUTCOME, content, status)).post("/")
    assert at_once.content == streamed.content
    assert len(at_once.content) == length
    assert at_once.headers == streamed.headers


def test_what_was_held_is_let_go_of_when_bytes_were_sent(tmp_path: Path) -> None:
    path, gone = tmp_path / "labels.ome.tif", list[str]()
    path.write_bytes(b"labels")
    response = build_response(path, OUTCOME, path.read_bytes())
    response.resources.callback(gone.append, "held")
    assert TestClient(response).post("/").content == b"labels"
    assert gone == ["held"]
