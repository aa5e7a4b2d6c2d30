"""Downloads from a local server that cuts connections, changes its files, and redirects."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from service.cli.model_packages.download import Downloader
from service.core.errors import BadParameter, StackSegError, StorageUnavailable, UnsupportedPackage

CONTENT = os.urandom(300_000)


class Server(ThreadingHTTPServer):
    """Serves `content`, and sends at most `part_bytes` per response. `on_request` is called with each Range header."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.part_bytes, self.etag = CONTENT, 2**30, '"1"'
        self.location: str | None = None
        self.ranges = list[str | None]()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        pass

    def change(self) -> None:
        self.content, self.etag, self.part_bytes = CONTENT[::-1], '"2"', 2**30


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, requested = self.server, self.headers["Range"]
        server.ranges.append(requested)
        if server.location is not None:
            self.send_response(302)
            self.send_header("Location", server.location)
            self.end_headers()
            return
        if len(server.ranges) == 2 and self.path == "/changing":
            server.change()
        is_partial = requested is not None and self.headers["If-Range"] == server.etag
        start = int(requested[6:-1]) if is_partial else 0
        content = server.content[start:]
        self.send_response(206 if is_partial else 200)
        if is_partial:
            total = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if self.path != "/unknown-size":
            self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", server.etag)
        self.end_headers()
        self.wfile.write(content[: server.part_bytes])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetch(url: str, path: Path, sha256: str | None = None, **limits: Any) -> bytes:
    Downloader(**({"pause_seconds": 0.01} | limits)).fetch(url, path, sha256, lambda _done, _total: None)
    return path.read_bytes()


def test_interrupted_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.part_bytes = 100_001
    assert fetch(f"{server.url}/file", tmp_path / "file", hashlib.sha256(CONTENT).hexdigest()) == CONTENT
    assert server.ranges == [None, "bytes=100001-", "bytes=200002-"]


def test_file_that_changes_during_the_download_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    server.part_bytes = 100_001
    assert fetch(f"{server.url}/changing", tmp_path / "file") == CONTENT[::-1]


def test_server_that_sends_nothing_is_given_up(server: Server, tmp_path: Path) -> None:
    server.part_bytes = 0
    with pytest.raises(StorageUnavailable, match="interrupted before the file was complete"):
        fetch(f"{server.url}/file", tmp_path / "file")
    assert len(server.ranges) == 4


@pytest.mark.parametrize("name", ["file", "unknown-size"])
def test_size_is_limited(server: Server, tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedPackage, match="more than 1000 bytes"):
        fetch(f"{server.url}/{name}", tmp_path / "file", max_bytes=1000)
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size <= 1000


def test_wrong_hash_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedPackage, match="SHA-256"):
        fetch(f"{server.url}/file", tmp_path / "file", "0" * 64)


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("http://example.org/file", BadParameter, "only https is allowed"),
        ("file:///etc/passwd", BadParameter, "not a valid URL"),
        ("/again", StorageUnavailable, "redirects more than 5 times"),
    ],
)
def test_redirects_are_checked(
    server: Server, tmp_path: Path, location: str, error: type[StackSegError], message: str
) -> None:
    server.location = location
    with pytest.raises(error, match=message):
        fetch(f"{server.url}/file", tmp_path / "file")


@pytest.mark.parametrize("url", ["http://example.org/a.zip", "ftp://127.0.0.1/a", "https://me:key@host/a", "https://"])
def test_unsafe_urls_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter):
        fetch(url, tmp_path / "file")


def test_redirect_from_another_host_to_this_computer_needs_https() -> None:
    with pytest.raises(BadParameter, match="redirected from"):
        Downloader()._check_url("http://127.0.0.1/admin", origin="https://example.org/file")
