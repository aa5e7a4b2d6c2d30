"""Tests of service.api.messages.results: what is sent for a result."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.api.messages.results import SMALL_BYTES, FileSnapshot, build_response
from service.serving.results.metadata import AnswerMetadata

OUTCOME = AnswerMetadata("bands/1", "image/tiff", "stack_labels.ome.tif", "labels", {"total": 0.25})


@pytest.mark.parametrize("length", [0, 10, SMALL_BYTES, SMALL_BYTES + 1])
def test_an_answer_is_the_same_whether_its_bytes_are_at_hand_or_not(tmp_path: Path, length: int) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(bytes(range(256)) * (length // 256) + bytes(length % 256))
    snapshot = FileSnapshot.read(path)
    assert (snapshot.content is None) == (length > SMALL_BYTES)
    streamed = TestClient(build_response(path, OUTCOME)).post("/")
    if snapshot.content is not None:
        path.unlink()
    at_once = TestClient(build_response(path, OUTCOME, snapshot)).post("/")
    assert at_once.content == streamed.content
    assert len(at_once.content) == length
    assert at_once.headers == streamed.headers


def test_what_was_held_is_let_go_of_when_bytes_were_sent(tmp_path: Path) -> None:
    path, gone = tmp_path / "labels.ome.tif", list[str]()
    path.write_bytes(b"labels")
    response = build_response(path, OUTCOME, FileSnapshot.read(path))
    response.resources.callback(gone.append, "held")
    assert TestClient(response).post("/").content == b"labels"
    assert gone == ["held"]
