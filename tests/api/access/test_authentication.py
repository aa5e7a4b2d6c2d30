"""Tests of API keys, rate limits, CORS and response headers, with a fake segmenter."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import wait_until
from job_service import Service, start_service
from live import TIFF, parse_problem
from starlette.testclient import TestClient

from service.api.access.keys import hash_key
from service.core import telemetry

ADA, BOB = "stackseg_ada", "stackseg_bob"
KEYS = {"ada": hash_key(ADA), "bob": hash_key(BOB)}


def make_bearer_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def segment(service: Service, key: str) -> int:
    return int(service.segment(headers=TIFF | make_bearer_header(key)).status_code)


@pytest.fixture(scope="module")
def protected_service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    hosts, origins = ["localhost", "*.example.org", "::1"], ["https://viewer.example.org"]
    access = {"keys": KEYS, "hosts": hosts, "origins": origins}
    with start_service(bands_repository, tmp_path_factory.mktemp("service"), access=access) as running:
        yield running


@pytest.fixture
def protected_client(protected_service: Service) -> TestClient:
    return protected_service.client


def get_problem(response: Any) -> tuple[int, str]:
    assert response.headers["x-request-id"] in response.json()["instance"]
    return parse_problem(response)


@pytest.mark.parametrize("headers", [make_bearer_header(ADA), {"Authorization": f"bearer  {ADA} "}, {"X-API-Key": ADA}])
def test_valid_key_is_accepted(protected_service: Service, headers: dict[str, str]) -> None:
    assert protected_service.segment(headers=TIFF | headers).status_code == 200


def test_bearer_token_takes_precedence_over_x_api_key(protected_client: TestClient) -> None:
    api_key = {"X-API-Key": BOB}
    assert protected_client.get("/models", headers=make_bearer_header("stackseg_eve") | api_key).status_code == 401
    assert protected_client.get("/models", headers={"Authorization": "Basic a"} | api_key).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        make_bearer_header("stackseg_eve"),
        make_bearer_header(""),
        make_bearer_header("x" * 10_000),
        make_bearer_header(ADA[:-1]),
        {"X-API-Key": "ключ"},
        {"Authorization": f"Basic {ADA}"},
        make_bearer_header(KEYS["ada"]),
    ],
)
@pytest.mark.parametrize("method_and_path", ["POST /segment", "GET /models", "GET /metrics", "GET /nowhere"])
def test_request_without_a_valid_key_is_rejected(
    protected_client: TestClient, headers: dict[str, str], method_and_path: str
) -> None:
    method, path = method_and_path.split()
    encoded = {name: value.encode() for name, value in headers.items()}
    response = protected_client.request(method, path, headers=encoded)
    assert get_problem(response) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == 'Bearer realm="stackseg"'


def test_health_and_documentation_need_no_key(protected_client: TestClient) -> None:
    for prefix in ("", "/v1", "/v2"):
        assert protected_client.get(f"{prefix}/health/live").status_code == 200
        assert protected_client.get(f"{prefix}/health/ready").status_code == 200
    assert protected_client.get("/health").status_code == 200
    for path in ("/docs", "/docs/page.js", "/openapi.json", "/page/main.js", "/page/core/base.css"):
        assert protected_client.get(path).status_code == 200
    assert protected_client.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/healthy", "/health/live/x", "/v3/health", "/models%2f..%2fhealth", "/health%0a"])
def test_paths_similar_to_health_need_a_key(protected_client: TestClient, path: str) -> None:
    assert protected_client.get(path).status_code == 401


def test_openapi_describes_how_to_send_a_key_and_which_paths_need_none(protected_client: TestClient) -> None:
    document = protected_client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["header"]["name"] == "X-API-Key"
    assert document["security"] == [{"bearer": []}, {"header": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == []
    assert "security" not in document["paths"]["/segment"]["post"]


def test_metrics_and_log_contain_names_of_callers_but_not_their_keys(
    protected_service: Service, protected_client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        segment(protected_service, BOB)
        protected_client.get("/models", headers=make_bearer_header("stackseg_eve"))
    entry, rejected = (json.loads(telemetry.JsonFormatter().format(record)) for record in caplog.records)
    assert (entry["caller"], entry["model"], entry["status"], entry["route"]) == ("bob", "bands/1", 200, "/segment")
    assert entry["stages"].keys() == {"receive", "read", "queue", "windows", "write", "total"}
    assert (rejected["caller"], rejected["problem"]) == ("nobody", "unauthorized")
    text = protected_client.get("/metrics", headers=make_bearer_header(BOB)).text
    assert 'stackseg_caller_requests_total{caller="bob"}' in text
    assert 'stackseg_errors_total{type="unauthorized"}' in text
    assert "stackseg_eve" not in text + caplog.text
    assert BOB not in text + caplog.text


def test_requests_cannot_inject_lines_into_the_log(
    protected_client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "service"):
        headers = make_bearer_header(ADA) | {"X-Request-Id": "a%0ab", "User-Agent": "forged\tline"}
        protected_client.get("/jobs/%0Aforged%0D%0Aline%1b%5b2J", headers=headers)
        protected_client.post("/segment?model=%0Aforged%0Aline", headers=headers, content=b"x")
    assert caplog.records
    for record in caplog.records:
        assert record.getMessage().isprintable()


def test_rate_limit_applies_to_each_key_separately(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path, access={"keys": KEYS, "requests_per_minute": 3}) as service:
        client = service.client
        assert [client.get("/models", headers=make_bearer_header(ADA)).status_code for _ in range(3)] == [200] * 3
        rejected = client.get("/models", headers=make_bearer_header(ADA))
        assert get_problem(rejected) == (429, "rate-limited")
        assert 1 <= int(rejected.headers["retry-after"]) <= 20
        assert client.get("/models", headers=make_bearer_header(BOB)).status_code == 200
        assert client.get("/health").status_code == 200


def test_concurrency_limit_applies_to_each_key_until_the_response(bands_repository: Path, tmp_path: Path) -> None:
    access = {"keys": KEYS, "requests_at_once": 1}
    with start_service(bands_repository, tmp_path, access=access) as service, ThreadPoolExecutor(2) as pool:
        service.fake.gate.clear()
        first = pool.submit(segment, service, ADA)
        wait_until(lambda: service.runtime.devices.running_jobs)
        assert get_problem(service.segment(headers=TIFF | make_bearer_header(ADA))) == (429, "rate-limited")
        assert service.client.get("/models", headers=make_bearer_header(ADA)).status_code == 200
        other = pool.submit(segment, service, BOB)
        service.fake.gate.set()
        assert [first.result(), other.result(), segment(service, ADA)] == [200] * 3


def test_cors_allows_configured_origins_to_read_all_documented_headers(protected_client: TestClient) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-filename"}
    allowed = protected_client.options("/segment", headers={"Origin": "https://viewer.example.org"} | preflight)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://viewer.example.org")
    response = protected_client.get(
        "/models", headers={"Origin": "https://viewer.example.org"} | make_bearer_header(ADA)
    )
    readable = set(response.headers["access-control-expose-headers"].split(", "))
    paths = protected_client.get("/openapi.json").json()["paths"]
    operations = [operation for methods in paths.values() for operation in methods.values()]
    responses = [response for operation in operations for response in operation["responses"].values()]
    documented = {name for response in responses for name in response.get("headers", {})}
    assert {"X-StackSeg-Objects", "X-StackSeg-Shape"} <= documented <= readable
    rejected = protected_client.get("/models", headers={"Origin": "https://viewer.example.org"})
    assert (rejected.status_code, "access-control-allow-origin" in rejected.headers) == (401, True)
    other = protected_client.options("/segment", headers={"Origin": "https://evil.org"} | preflight)
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_cors_is_disabled_by_default(service: Service) -> None:
    response = service.client.get("/models", headers={"Origin": "https://viewer.example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


# Method, path, and status of a successful request.
ADMIN_REQUESTS = [("GET", "/status", 200), ("POST", "/models/reload", 200)]


def test_admin_requests_need_the_key_of_an_admin(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path, access={"keys": KEYS, "admins": ["ada"]}) as service:
        for method, path, success in ADMIN_REQUESTS:
            for headers in (make_bearer_header(BOB), make_bearer_header("stackseg_eve"), {}):
                assert get_problem(service.client.request(method, path, headers=headers)) == (401, "unauthorized")
            response = service.client.request(method, path, headers=make_bearer_header(ADA))
            assert (response.status_code, "ada" in response.text) == (success, False)


def test_without_keys_admin_requests_are_accepted_only_from_the_same_host(service: Service) -> None:
    local, remote = (
        TestClient(service.app, "http://localhost", client=(host, 1)) for host in ("127.0.0.1", "192.0.2.7")
    )
    for method, path, status in (*ADMIN_REQUESTS, ("DELETE", "/models/bands", 409)):
        assert local.request(method, path).status_code == status
        assert get_problem(remote.request(method, path)) == (401, "unauthorized")


def test_without_configured_keys_none_is_required_or_documented(service: Service) -> None:
    assert service.client.get("/models", headers=make_bearer_header("whatever")).status_code == 200
    assert "security" not in service.client.get("/openapi.json").json()


def test_every_response_has_security_headers(service: Service) -> None:
    service.fake.error = KeyError("unforeseen")
    crashed = service.segment()
    assert get_problem(crashed) == (500, "internal-error")
    for response in (
        crashed,
        service.client.get("/models"),
        service.client.get("/nowhere"),
        service.client.get("/docs"),
    ):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "default-src 'none'" in crashed.headers["content-security-policy"]
    assert "default-src 'self'" in service.client.get("/docs").headers["content-security-policy"]


@pytest.mark.parametrize("request_id", ["trace-1.b_C", "0af7651916cd43dd8448eb211c80319c", "x" * 128])
def test_valid_request_id_of_the_client_is_used(service: Service, request_id: str) -> None:
    response = service.client.get("/nowhere", headers={"X-Request-ID": request_id})
    assert response.headers["x-request-id"] == request_id
    assert response.json()["instance"].startswith("urn:")


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\tb", "é", "<script>", 'a"b'])
def test_invalid_request_id_of_the_client_is_replaced(service: Service, request_id: str) -> None:
    response = service.client.get("/nowhere", headers={"X-Request-ID": request_id.encode()})
    assert response.headers["x-request-id"] != request_id
    assert response.json()["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
