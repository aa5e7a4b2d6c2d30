from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from job_service import Service, start_service
from live import STACK, TIFF
from pydantic import ValidationError
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from service.api.access.keys import hash_key
from service.api.access.path_prefix import TRUSTED_PROXIES_VARIABLE, ForwardedHeaders
from service.core.sections.serving import Server

KEY = "stackseg_ada"


def forward(client: str, headers: dict[str, str]) -> Scope:
    """Return the scope that the application gets for a request for /jobs from this address."""
    scopes: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    raw_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/jobs", "root_path": "", "client": (client, 1), "headers": raw_headers}
    asyncio.run(ForwardedHeaders(app)(scope, None, None))
    return scopes[0]


@pytest.mark.parametrize(
    ("header", "prefix"),
    [
        ("/seg", "/seg"),
        ("/lab/seg/", "/lab/seg"),
        ("/lab, /seg", "/lab/seg"),
        ("/", ""),
        ("", ""),
        ("seg", ""),
        ("//evil.example", ""),
        ("/seg//evil.example", ""),
        ("/../seg", ""),
        ("/seg\\evil", ""),
        ("https://evil.example/seg", ""),
        ("/seg?x", ""),
        ("/a" * 100, ""),
    ],
)
def test_prefix_of_a_trusted_proxy_must_be_a_plain_path(header: str, prefix: str) -> None:
    scope = forward("127.0.0.1", {"X-Forwarded-Prefix": header})
    assert (scope["root_path"], scope["path"]) == (prefix, f"{prefix}/jobs")


def test_headers_are_applied_only_if_the_proxy_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"X-Forwarded-Prefix": "/seg", "X-Forwarded-For": "198.51.100.3"}
    applied, ignored = ("/seg", "/seg/jobs", "198.51.100.3"), ("", "/jobs", "192.0.2.7")

    def summarize(client: str) -> tuple[str, str, str]:
        scope = forward(client, headers)
        return scope["root_path"], scope["path"], scope["client"][0]

    monkeypatch.delenv(TRUSTED_PROXIES_VARIABLE, raising=False)
    assert summarize("127.0.0.1") == summarize("::1") == applied
    assert summarize("192.0.2.7") == ignored
    monkeypatch.setenv(TRUSTED_PROXIES_VARIABLE, "192.0.2.7")
    assert summarize("192.0.2.7") == applied


@pytest.mark.parametrize("root_path", ["seg", "/seg/", "//seg", "/", "/a b"])
def test_root_path_must_be_a_plain_path(root_path: str) -> None:
    with pytest.raises(ValidationError):
        Server(root_path=root_path)


def submit(client: TestClient, path: str, **headers: str) -> Any:
    return client.post(path, content=STACK, headers=TIFF | headers)


@pytest.mark.parametrize("is_stripped", [True, False], ids=["stripped", "unchanged"])
def test_urls_begin_with_the_configured_path(bands_repository: Path, tmp_path: Path, *, is_stripped: bool) -> None:
    """The proxy may remove the path before it forwards a request."""
    server = {"scratch_folder": tmp_path, "root_path": "/lab/seg"}
    with start_service(bands_repository, tmp_path, server=server) as service:
        received = "" if is_stripped else "/lab/seg"
        response = submit(service.client, f"{received}/jobs")
        job = response.json()["id"]
        assert response.headers["location"] == f"/lab/seg/jobs/{job}"
        asynchronous = submit(service.client, f"{received}/segment", Prefer="respond-async")
        assert asynchronous.headers["location"] == f"/lab/seg/jobs/{asynchronous.json()['id']}"
        service.wait({"id": job}, "done")
        assert service.client.get(f"{received}/jobs/{job}").json()["result"] == f"/lab/seg/jobs/{job}/result"
        redirect = service.client.get(f"{received}/jobs/", follow_redirects=False)
        assert redirect.headers["location"] == "http://localhost/lab/seg/jobs"
        assert service.client.get(f"{received}/openapi.json").json()["servers"] == [{"url": "/lab/seg"}]
        assert "/lab/seg/docs" in service.client.get(f"{received}/nowhere").json()["detail"]
        assert service.client.get("/lab/segment").status_code == 404


def test_forwarded_prefix_takes_precedence(bands_repository: Path, tmp_path: Path) -> None:
    server = {"scratch_folder": tmp_path, "root_path": "/lab"}
    with start_service(bands_repository, tmp_path, server=server) as service:
        client = TestClient(ForwardedHeaders(service.app), "http://localhost", client=("127.0.0.1", 1))
        # The proxy has removed the first /jobs of the path /jobs/jobs.
        response = submit(client, "/jobs", **{"X-Forwarded-Prefix": "/jobs"})
        assert response.headers["location"] == f"/jobs/jobs/{response.json()['id']}"
        job = client.get(f"/jobs/{response.json()['id']}", headers={"X-Forwarded-Prefix": "/jobs"})
        assert job.status_code == 200


def test_without_a_proxy_urls_begin_at_the_root(service: Service) -> None:
    assert submit(service.client, "/jobs").headers["location"].startswith("/jobs/")
    assert "servers" not in service.client.get("/openapi.json").json()


def test_same_paths_need_a_key_below_a_prefix(bands_repository: Path, tmp_path: Path) -> None:
    server = {"scratch_folder": tmp_path, "root_path": "/lab"}
    with start_service(bands_repository, tmp_path, server=server, access={"keys": {"ada": hash_key(KEY)}}) as service:
        for prefix in ("", "/lab"):
            for path, status in {"/models": 401, "/health/live": 200, "/docs": 200, "/health/live/..": 401}.items():
                assert service.client.get(prefix + path.replace("..", "%2e%2e")).status_code == status, prefix + path
            headers = {"Authorization": f"Bearer {KEY}"}
            assert service.client.get(f"{prefix}/models", headers=headers).status_code == 200
        assert service.client.get("/lab/lab/health/live").status_code == 401
