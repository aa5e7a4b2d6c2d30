"""Tests in a real browser that pages of other origins cannot use the service, unless the operator allows it."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browsing import CHROMIUM_ARGUMENTS, CHROMIUM_PATH, OpenPage
from fakes import FakeSegmenter
from fastapi.routing import APIRoute
from live import STACK, LiveServer, eager_settings, serve
from playwright.sync_api import Browser, Page, expect

from service.api.access.cross_site import SAFE_METHODS

# Sends every request in all ways that a page can: fetch with and without CORS, and a form in a frame. Returns the
# outcomes of `fetch`: a status, "opaque" for a response that the page cannot read, or "blocked".
ATTACK = """async ([base, requests, bytes]) => {
  const body = () => new Blob([new Uint8Array(bytes)]);
  const outcomes = [];
  for (const [method, path] of requests) {
    for (const mode of method === "POST" ? ["cors", "no-cors"] : ["cors"]) {
      const content = method === "POST" ? { body: body() } : {};
      outcomes.push(await fetch(base + path, { method, mode, ...content }).then(
        response => response.type === "opaque" ? "opaque" : response.status, () => "blocked"));
    }
    if (method !== "POST") continue;
    const frame = Object.assign(document.createElement("iframe"), { name: "target" + outcomes.length });
    const form = Object.assign(document.createElement("form"),
      { method: "POST", action: base + path, enctype: "multipart/form-data", target: frame.name });
    const input = Object.assign(document.createElement("input"), { type: "file", name: "file" });
    const transfer = new DataTransfer();
    transfer.items.add(new File([body()], "stack.tif", { type: "image/tiff" }));
    input.files = transfer.files;
    form.append(input);
    document.body.append(frame, form);
    const loaded = new Promise(done => { frame.onload = done; });
    form.submit();
    await loaded;
  }
  return outcomes;
}"""
SEGMENT = """async ([url, bytes]) => {
  const headers = { "Content-Type": "image/tiff" };
  const response = await fetch(url, { method: "POST", headers, body: new Blob([new Uint8Array(bytes)]) });
  return response.status;
}"""


@contextmanager
def serve_page(folder: Path) -> Iterator[int]:
    """Serve an empty page in this folder from a free port of the loopback interface, and yield the port."""
    (folder / "index.html").write_text("<!doctype html><title>page</title><body></body>", encoding="utf-8")
    with run_http_server(partial(SimpleHTTPRequestHandler, directory=str(folder))) as port:
        yield port


@contextmanager
def run_http_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[int]:
    """Run an HTTP server on a free port of the loopback interface, and yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def make_proxy(port: int) -> type[BaseHTTPRequestHandler]:
    """Return a handler that forwards requests to a port and replaces their Host header, as nginx does by default."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in {"host", "connection"}
            }
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in {"connection", "content-length", "transfer-encoding"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_POST = forward  # noqa: N815 - names in the base class

        def log_message(self, *_arguments: Any) -> None:
            pass

    return Proxy


@contextmanager
def open_with_names(browser: Browser, *rules: str) -> Iterator[Page]:
    """Start a browser that resolves host names by these rules, such as `MAP name 127.0.0.1`, and yield a page."""
    arguments = [*CHROMIUM_ARGUMENTS, f"--host-resolver-rules={','.join(rules)}"]
    with browser.browser_type.launch(executable_path=CHROMIUM_PATH, args=arguments) as chromium:
        yield chromium.new_page()


def list_unsafe_requests(live: LiveServer, identifiers: dict[str, str]) -> list[tuple[str, str]]:
    """Return the method and path of all routes that may change something, with identifiers for path parameters."""
    routes: list[APIRoute] = get_service_app(live).state.endpoints
    return [
        (method, route.path.format_map(identifiers))
        for route in routes
        for method in sorted(route.methods - SAFE_METHODS)
    ]


def get_service_app(live: LiveServer) -> Any:
    """Return the application, without the middleware for the headers of proxies."""
    forwarded_headers: Any = live.server.config.app
    return forwarded_headers.app


def read_state(live: LiveServer) -> list[Any]:
    """Return everything that a request can change."""
    stacks = get_service_app(live).state.async_jobs.stacks.nbytes
    paths = "/jobs", "/annotations", "/trainings", "/projects", "/models"
    return [stacks, *(live.client.get(path).json() for path in paths)]


def test_pages_of_other_origins_change_nothing(browser: Browser, bands_repository: Path, tmp_path: Path) -> None:
    settings = eager_settings(
        bands_repository,
        models={"load": "all"},
        annotations={"folder": tmp_path / "annotations"},
        references={"outputs": {"results": tmp_path}},
    )
    target = tmp_path / "labels.tif"
    target.write_bytes(b"precious")
    with serve(settings, load=FakeSegmenter) as live, serve_page(tmp_path) as port:  # type: ignore[arg-type]
        job = live.run()
        stack = live.post("/stacks", STACK).json()["id"]
        identifiers = {
            "job": job["id"],
            "stack": stack,
            "name": "bands",
            "version": "1",
            "annotation": 32 * "0",
            "training": 32 * "0",
            "project": live.client.post("/projects", json={"name": "Trial"}).json()["id"],
        }
        requests = [
            *list_unsafe_requests(live, identifiers),
            ("POST", "/segment?output_to=results/labels.tif&overwrite=true"),
            ("POST", f"/jobs?stack={stack}"),
            ("POST", f"/annotations?stack={stack}"),
        ]
        before = read_state(live)
        # A page on another port, which is the same site but another origin, and a page on another site.
        for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
            page = browser.new_page()
            page.goto(origin)
            outcomes = page.evaluate(ATTACK, [f"http://127.0.0.1:{live.port}", requests, list(STACK)])
            page.close()
            assert set(outcomes) == {"blocked"}
        assert read_state(live) == before
        # The requests that browsers send without asking the service first arrived, and were refused.
        refused = re.search(r'stackseg_errors_total\{type="cross-site"\} (\d+)', live.client.get("/metrics").text)
        assert refused is not None
        assert int(refused[1]) >= 2 * sum(method == "POST" for method, _ in requests)
        assert live.client.get(f"/stacks/{stack}").status_code == 200
        assert target.read_bytes() == b"precious"


def test_page_of_a_configured_origin_can_segment(browser: Browser, bands_repository: Path, tmp_path: Path) -> None:
    with serve_page(tmp_path) as port:
        origin = f"http://localhost:{port}"
        settings = eager_settings(bands_repository, models={"load": "all"}, access={"origins": [origin]})
        with serve(settings, load=FakeSegmenter) as live:  # type: ignore[arg-type]
            page = browser.new_page()
            page.goto(origin)
            assert page.evaluate(SEGMENT, [f"http://127.0.0.1:{live.port}/segment", list(STACK)]) == 200
            page.close()


def test_page_of_a_rebound_host_name_reads_nothing(browser: Browser, fake: LiveServer) -> None:
    with open_with_names(browser, "MAP evil.example 127.0.0.1") as page:
        response = page.goto(f"http://evil.example:{fake.port}/jobs")
        assert response is not None
        assert response.status == 421


def test_web_ui_works_behind_a_proxy_with_another_host_name(browser: Browser, bands_repository: Path) -> None:
    hosts = ["stackseg.example", "renamed.example"]
    settings = eager_settings(bands_repository, models={"load": "all"}, access={"hosts": hosts})
    with (
        serve(settings, load=FakeSegmenter) as live,  # type: ignore[arg-type]
        run_http_server(make_proxy(live.port)) as proxy_port,
    ):
        # One proxy keeps the name, the other replaces it.
        names = zip(hosts, (live.port, proxy_port), strict=True)
        with open_with_names(browser, *(f"MAP {host} 127.0.0.1:{port}" for host, port in names)) as page:
            for host in hosts:
                page.goto(f"http://{host}")
                expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
                assert page.evaluate(SEGMENT, ["/segment", list(STACK)]) == 200


def test_link_with_a_path_as_id_leads_to_no_other_resource(fake: LiveServer, open_page: OpenPage) -> None:
    page, paths = open_page(fake), list[str]()
    page.on("request", lambda request: paths.append(request.url.partition(str(fake.port))[2]))
    for kind in ("training", "job", "stack", "compare"):
        page.goto("/")
        paths.clear()
        page.goto(f"/#{kind}=x/../../models/reload?,y")
        expect(page.locator("#problem")).to_contain_text("incomplete or mistyped")
        expect(page.locator("body")).not_to_have_class("busy")
        assert not any(path.startswith("/models/") for path in paths), kind
