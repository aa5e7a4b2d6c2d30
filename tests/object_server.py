"""An HTTP server for files with range requests, like S3, that can inject faults."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class ObjectServer(ThreadingHTTPServer):
    """Serves the files of a folder and records the requested paths.

    `faults` maps the suffix of a path to a fault: a status (int), a delay in seconds (float), a URL to redirect to, or
    "cut" to send only half of the bytes. `requested_paths` lists the requested paths in order.
    `authorized_paths` lists the paths of requests with an Authorization header.
    """

    daemon_threads = True

    def __init__(self, folder: Path, certificate: Mapping[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requested_paths, self.authorized_paths = folder, list[str](), list[str]()
        self.faults: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate["ssl_certfile"], certificate["ssl_keyfile"])
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: tests close connections early."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name in the base class
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requested_paths.append(path)
        if "Authorization" in self.headers:
            self.server.authorized_paths.append(path)
        fault = next((fault for end, fault in self.server.faults.items() if path.endswith(end)), None)
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            return self._answer(fault, b"")
        if isinstance(fault, str) and fault != "cut":
            return self._answer(302, b"", Location=fault)
        try:
            content = (self.server.folder / path[1:]).read_bytes()
        except OSError:
            return self._answer(404, b"")
        total, status, headers = len(content), 200, {}
        if (requested := self.headers.get("Range")) is not None:
            first, last = requested.removeprefix("bytes=").split("-")
            start = int(first) if first else max(0, total - int(last))
            if start >= total:
                return self._answer(416, b"")
            content = content[start : int(last) + 1] if first else content[start:]
            status, headers = 206, {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}"}
        return self._answer(status, content, cut=fault == "cut", **headers)

    do_HEAD = do_GET  # noqa: N815 - name in the base class

    def _answer(self, status: int, content: bytes, *, cut: bool = False, **headers: str) -> None:
        self.send_response(status)
        defaults = {
            "Content-Length": str(len(content)),
            "ETag": '"1"',
            "Last-Modified": "Mon, 23 Nov 2026 14:00:00 GMT",
        }
        for name, value in (defaults | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut


@contextmanager
def serve_objects(folder: Path, certificate: Mapping[str, str] | None = None) -> Iterator[ObjectServer]:
    """Serve a folder until the context exits.

    certificate  files of a private key and a certificate, for HTTPS; None: HTTP
    """
    with ObjectServer(folder, certificate) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
