"""Responses that send files, and responses with a result."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from service.api.requests.downloads import DownloadResponse, build_response, select_ranges
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


@pytest.mark.parametrize(
    ("header", "selected"),
    [
        ("bytes=0-9", "bytes=0-9"),
        ("bytes=90-200", "bytes=90-200"),
        ("bytes=99-", "bytes=99-"),
        ("bytes=-5", "bytes=-5"),
        ("bytes=-500", "bytes=-500"),
        ("BYTES=1-2", "bytes=1-2"),
        ("bytes=0-0, 500-600, 20-29,", "bytes=0-0,20-29"),
        ("lines=1-2", None),
        ("bytes=100-", 416),
        ("bytes=5-4", 416),
        ("bytes=-0", 416),
        ("bytes=-", 416),
        ("bytes=", 416),
        ("bytes", 416),
        ("bytes=a-b", 416),
        ("bytes=1-2,a", 416),
        ("bytes=+1-2", 416),
        ("bytes=1_0-20", 416),
        (f"bytes={'9' * 5000}-", 416),
    ],
)
def test_ranges_are_selected_from_a_file_of_100_bytes(header: str, selected: str | int | None) -> None:
    if selected == 416:
        with pytest.raises(HTTPException) as raised:
            select_ranges(header, 100)
        assert (raised.value.status_code, raised.value.headers) == (416, {"Content-Range": "bytes */100"})
    else:
        assert select_ranges(header, 100) == selected


def test_no_range_of_an_empty_file_can_be_selected() -> None:
    for header in ("bytes=0-", "bytes=-5"):
        with pytest.raises(HTTPException):
            select_ranges(header, 0)


def test_parts_of_a_file_are_sent_if_it_has_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(bytes(range(200)))
    client = TestClient(DownloadResponse(path, media_type="image/tiff", stat_result=path.stat()))
    etag = client.get("/").headers["etag"]

    def get(**headers: str) -> tuple[int, bytes, str | None]:
        response = client.get("/", headers={name.replace("_", "-"): value for name, value in headers.items()})
        return response.status_code, response.content, response.headers.get("content-range")

    whole = (200, bytes(range(200)), None)
    assert (
        get(Range="bytes=100-")
        == get(Range="bytes=100-", If_Range=etag)
        == (
            206,
            bytes(range(100, 200)),
            "bytes 100-199/200",
        )
    )
    assert get(Range="bytes=-3") == (206, bytes([197, 198, 199]), "bytes 197-199/200")
    assert get(Range="bytes=100-", If_Range='"other"') == get(Range="bytes=500-", If_Range='"other"') == whole
    assert get(Range="lines=1-2") == whole
    status, content, _ = get(Range="bytes=0-1,10-11")
    assert status == 206
    assert b"Content-Range: bytes 0-1/200\r\n\r\n\x00\x01\r\n" in content
    assert b"Content-Range: bytes 10-11/200\r\n\r\n\x0a\x0b\r\n" in content
    # Ranges are defined only for GET.
    for method in ("HEAD", "POST"):
        response = client.request(method, "/", headers={"Range": "bytes=100-"})
        assert (response.status_code, response.headers["content-length"]) == (200, "200")


def test_client_that_accepts_only_bytes_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(b"labels")
    for content in (None, b"labels"):
        for accept, media_type in {
            "application/octet-stream": "application/octet-stream",
            "application/octet-stream, */*": "image/tiff",
            "*/*": "image/tiff",
        }.items():
            client = TestClient(build_response(path, METADATA, content))
            assert client.post("/", headers={"Accept": accept}).headers["content-type"] == media_type


def test_conditions_are_compared_with_the_etag_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(b"labels")
    client = TestClient(DownloadResponse(path, media_type="image/tiff", stat_result=path.stat()))
    etag = client.get("/").headers["etag"]

    def get_status(method: str = "GET", **headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.request(method, "/", headers=names).status_code

    for header in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        assert get_status(If_None_Match=header) == get_status("HEAD", If_None_Match=header) == 304
        assert get_status("POST", If_None_Match=header) == 200
    assert get_status(If_None_Match='"other"') == get_status(If_Match=etag) == get_status(If_Match="*") == 200
    assert get_status(If_Match=etag, Range="bytes=0-1") == 206
    for header in ('"other"', f"W/{etag}"):
        with pytest.raises(HTTPException) as raised:
            get_status(If_Match=header)
        assert raised.value.status_code == 412
    response = client.get("/", headers={"If-None-Match": etag})
    assert (response.content, response.headers["etag"], "content-length" in response.headers) == (b"", etag, False)
