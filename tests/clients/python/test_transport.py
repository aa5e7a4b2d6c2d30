"""Connections to servers behind HTTPS and proxies, and to servers of other versions."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import as_tiff
from paths import ROOT
from sockets import TIMEOUT_SECONDS, create_certificate, make_server, needs_openssl, run_server
from stackseg_client import AsyncClient, Client, ConnectionFailed, Job, JobReport, Retries, errors
from stackseg_client.retries import PATIENT_RETRIES
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

# A response with only those members that every version has.
MODELS = {"models": [{"name": "nuclei", "state": "ready", "of-a-later-version": [1]}]}


class FixedApp:
    """Answers every request with the same response."""

    def __init__(self, response: Response) -> None:
        self.response, self.scopes = response, list[Scope]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await self.response(scope, receive, send)


@contextmanager
def serve_fixed(response: Response, **files: Any) -> Iterator[tuple[FixedApp, str]]:
    """Serve a response until the context exits. Yields the application and the address."""
    app = FixedApp(response)
    with run_server(make_server(app, TIMEOUT_SECONDS, TIMEOUT_SECONDS, **files)) as (_host, port):
        yield app, f"localhost:{port}"


@needs_openssl
def test_certificates_are_checked_with_the_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = create_certificate(tmp_path)
    once = Retries(count=0)
    with serve_fixed(JSONResponse(MODELS), **files) as (_app, address):
        with Client(f"https://{address}", ca_file=files["ssl_certfile"]) as client:
            assert [model.name for model in client.models()] == ["nuclei"]
        with Client(f"https://{address}", retries=once) as client, pytest.raises(ConnectionFailed, match="ca_file="):
            client.models()
        # Programs without this argument, such as the napari plugin, use the variable of OpenSSL.
        monkeypatch.setenv("SSL_CERT_FILE", str(files["ssl_certfile"]))
        with Client(f"https://{address}") as client:
            assert client.models()
    expected = pytest.raises(ConnectionFailed, match="begins with http://")
    with serve_fixed(JSONResponse(MODELS)) as (_app, address), expected:
        Client(f"https://{address}", retries=once).models()
    with pytest.raises(FileNotFoundError, match="missing"):
        Client("https://localhost", ca_file=tmp_path / "missing.pem")
    with pytest.raises(ValueError, match="no certificate in the PEM format"):
        Client("https://localhost", ca_file=__file__)


def test_paths_of_proxies_and_keys_with_line_breaks_are_accepted() -> None:
    with serve_fixed(JSONResponse(MODELS)) as (app, address), Client(f"http://{address}/lab/seg/", "a-key\n") as client:
        client.models()
    assert app.scopes[0]["path"] == "/lab/seg/models"
    assert (b"authorization", b"Bearer a-key") in app.scopes[0]["headers"]
    for key in ("a key", "Schlüssel", "a\nkey"):
        with pytest.raises(ValueError, match="Copy it again"):
            Client("http://localhost:8000", key)


def test_users_and_passwords_of_proxies_are_sent_with_the_key_and_not_shown() -> None:
    with serve_fixed(JSONResponse(MODELS)) as (app, address), Client(f"http://ann:secret@{address}", "a-key") as client:
        client.models()
    headers = dict(app.scopes[0]["headers"])
    assert headers[b"authorization"].startswith(b"Basic ")
    assert headers[b"x-api-key"] == b"a-key"
    expected = pytest.raises(ConnectionFailed, match=r"http://127\.0\.0\.1:7 cannot be reached")
    with Client("http://ann:secret@127.0.0.1:7", retries=Retries(count=0)) as client, expected:
        client.models()


class ConnectionRecorder:
    """Answers with the list of models, and records the ports of the clients, one per connection."""

    def __init__(self) -> None:
        self.ports = list[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.ports.append(scope["client"][1])
        await JSONResponse(MODELS)(scope, receive, send)


def test_forked_processes_have_their_own_connections() -> None:
    app = ConnectionRecorder()
    with run_server(make_server(app, TIMEOUT_SECONDS, TIMEOUT_SECONDS)) as (host, port):
        code = FORKED.format(url=f"http://{host}:{port}")
        environment = {"PYTHONPATH": str(ROOT / "clients" / "python")}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    # Responses to requests of several processes over one connection could be mistaken for each other.
    parent, repeated, child = app.ports
    assert parent == repeated != child


FORKED = """
import os
from stackseg_client import Client
client = Client("{url}")
client.models()
client.models()
if not (child := os.fork()):
    client.models()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_redirects_are_not_followed_but_named() -> None:
    # They would send the key to another address.
    response = RedirectResponse("https://lab.example.org/models", 301)
    expected = pytest.raises(errors.RequestError, match=r"redirects to https://lab\.example\.org/models")
    with serve_fixed(response) as (_app, address), Client(f"http://{address}", "key") as client, expected:
        client.models()


def test_reports_of_other_versions_are_read() -> None:
    with serve_fixed(JSONResponse(MODELS)) as (_app, address), Client(f"http://{address}") as client:
        (model,) = client.models()
        assert (model.name, model.outputs, model.is_default) == ("nuclei", [], False)
        assert model.raw["of-a-later-version"] == [1]
        with pytest.raises(errors.InvalidResponse, match="not a response of a StackSeg server"):
            client.job("1")
    report = {"id": "1", "state": "running"}
    with serve_fixed(JSONResponse(report)) as (_app, address), Client(f"http://{address}") as client:
        job = client.job("1")
    assert (job.report.fraction, job.report.warnings, job.report.problem) == (0, [], None)
    events = Response('data: {"state": "done"}\n\n', media_type="text/event-stream")
    expected = pytest.raises(errors.InvalidResponse, match="not events")
    with serve_fixed(events) as (_app, address), Client(f"http://{address}") as client, expected:
        list(Job(client, job.report).progress())


def test_pages_of_other_servers_are_not_followed_as_jobs() -> None:
    job = JobReport("1", "running", "", "", None, None, 0, 0, None, None, [], None, {})
    page = Response("<html>Log in</html>", media_type="text/html")
    with (
        serve_fixed(page) as (_app, address),
        Client(f"http://{address}") as client,
        pytest.raises(errors.InvalidResponse, match=r"text/html instead of text/event-stream"),
    ):
        list(Job(client, job).progress())


def test_lists_instead_of_reports_are_refused() -> None:
    expected = pytest.raises(errors.InvalidResponse, match="not a response of a StackSeg server")
    with serve_fixed(JSONResponse([1])) as (_app, address), Client(f"http://{address}") as client, expected:
        client.submit(np.zeros((2, 4, 5), np.uint8))


@pytest.mark.parametrize("make_client", [Client, AsyncClient])
def test_invalid_addresses_are_refused(make_client: Callable[[str], object]) -> None:
    for url in (
        "localhost:8000",
        "http://localhost:abc",
        "http://[::1",
        "http://localhost/?a=b",
        "http://localhost/#a",
    ):
        with pytest.raises(ValueError, match=r"Use for example http://localhost:8000"):
            make_client(url)
    make_client(" HTTP://localhost:8000\n")


def test_unusable_proxies_and_certificates_of_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    once = Retries(count=0)
    monkeypatch.setenv("HTTP_PROXY", "http://ann:secret@127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "other.example.org")
    with Client("http://127.0.0.1:7", retries=once) as client, pytest.raises(ConnectionFailed) as caught:
        client.models()
    assert "names the proxy 127.0.0.1:9 for it" in str(caught.value)
    assert "trust_env=False" in str(caught.value)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Client("http://127.0.0.1:7", retries=once) as client, pytest.raises(ConnectionFailed) as caught:
        client.models()
    assert "proxy" not in str(caught.value)
    monkeypatch.setenv("HTTP_PROXY", "nonsense://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"proxy of the environment cannot be used.* NO_PROXY"):
        Client("http://127.0.0.1:7")
    Client("http://127.0.0.1:7", trust_env=False).close()
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.setenv("SSL_CERT_FILE", "/missing.pem")
    with pytest.raises(OSError, match=r"SSL_CERT_FILE=/missing\.pem"):
        Client("https://127.0.0.1:7")


def test_slow_servers_are_named_with_the_time_limit() -> None:
    async def answer_late(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.sleep(1)

    server = make_server(answer_late, TIMEOUT_SECONDS, TIMEOUT_SECONDS)
    expected = pytest.raises(ConnectionFailed, match=r"ReadTimeout.* Increase timeout")
    with run_server(server) as (host, port), expected:
        Client(f"http://{host}:{port}", timeout=0.2, retries=Retries(count=0)).models()


def test_folders_and_jobs_wait_for_a_restart_of_minutes(caplog: pytest.LogCaptureFixture) -> None:
    error = ConnectionFailed("lost", is_sent=True)
    retries = Retries().make_patient()
    delays = [retries.get_delay(error, attempt, is_repeatable=True) for attempt in range(PATIENT_RETRIES)]
    assert all(delay is not None and delay < 20 for delay in delays)
    assert 400 < sum(filter(None, delays)) < 900
    assert retries.get_delay(error, PATIENT_RETRIES, is_repeatable=True) is None
    assert "lost Trying again in 1" in caplog.text
    assert Retries(max_seconds=3).get_delay(error, 2, is_repeatable=True) is not None


def test_folders_and_jobs_wait_as_long_as_a_server_asks() -> None:
    error = errors.QueueFull(503, "queue-full", "Busy", "The queue is full.", retry_after=900)
    assert Retries().get_delay(error, 0, is_repeatable=True) is None
    assert Retries().make_patient().get_delay(error, 0, is_repeatable=True) == 900
    assert Retries(count=0).make_patient().get_delay(error, 0, is_repeatable=True) is None


INTERRUPTED = """
import sys
from stackseg_client import Client
for item in Client(sys.argv[1]).segment_folder("stacks", "labels"):
    print(item.path.name, flush=True)
"""


def test_interrupting_a_folder_does_not_wait_for_its_stacks(tmp_path: Path, nuclei_url: str) -> None:
    (tmp_path / "stacks").mkdir()
    large = np.random.default_rng(0).integers(0, 999, (160, 384, 384), np.uint16)
    for name, pixels in (("a", large[:8, :16, :16]), ("b", large), ("c", large)):
        (tmp_path / "stacks" / f"{name}.tif").write_bytes(as_tiff(pixels))
    environment = {"PYTHONPATH": str(ROOT / "clients" / "python")}
    command = [sys.executable, "-c", INTERRUPTED, nuclei_url]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"a.tif\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert time.monotonic() - start < 5
    assert b"KeyboardInterrupt" in printed
    # The server cancels requests whose client disconnects.
    assert [path.name for path in (tmp_path / "labels").iterdir()] == ["a_labels.tif"]
