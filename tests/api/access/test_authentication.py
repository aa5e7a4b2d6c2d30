"""The way in, with a fake segmenter behind it: keys, limits, hosts, CORS, and what every answer carries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import until
from job_service import Service, start
from live import TIFF, problem
from starlette.testclient import TestClient

from service.api.access.keys import hash_key
from service.core import telemetry

ADA, BOB = "stackseg_ada", "stackseg_bob"
KEYS = {"ada": hash_key(ADA), "bob": hash_key(BOB)}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def segment(service: Service, key: str) -> int:
    return int(service.segment(headers=TIFF | bearer(key)).status_code)


@pytest.fixture(scope="module")
def guarded(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    hosts, origins = ["testserver", "*.example.org", "::1"], ["https://viewer.example.org"]
    access = {"keys": KEYS, "hosts": hosts, "origins": origins}
    with start(bands_repository, tmp_path_factory.mktemp("service"), access=access) as running:
        yield running


@pytest.fixture
def locked(guarded: Service) -> TestClient:
    return guarded.client


def problem_of(response: Any) -> tuple[int, str]:
    assert response.headers["x-request-id"] in response.json()["instance"]
    return problem(response)


@pytest.mark.parametrize("headers", [bearer(ADA), {"Authorization": f"bearer  {ADA} "}, {"X-API-Key": ADA}])
def test_known_key_is_let_in(guarded: Service, headers: dict[str, str]) -> None:
    assert guarded.segment(headers=TIFF | headers).status_code == 200


def test_bearer_goes_before_the_other_header(locked: TestClient) -> None:
    other = {"X-API-Key": BOB}
    assert locked.get("/models", headers=bearer("stackseg_eve") | other).status_code == 401
    assert locked.get("/models", headers={"Authorization": "Basic a"} | other).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("stackseg_eve"),
        bearer(""),
        bearer("x" * 10_000),
        bearer(ADA[:-1]),
        {"X-API-Key": "ключ"},
        {"Authorization": f"Basic {ADA}"},
        bearer(KEYS["ada"]),
    ],
)
@pytest.mark.parametrize("method_and_path", ["POST /segment", "GET /models", "GET /metrics", "GET /nowhere"])
def test_whoever_shows_no_known_key_stays_outside(
    locked: TestClient, headers: dict[str, str], method_and_path: str
) -> None:
    method, path = method_and_path.split()
    encoded = {name: value.encode() for name, value in headers.items()}
    response = locked.request(method, path, headers=encoded)
    assert problem_of(response) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == 'Bearer realm="stackseg"'


def test_health_and_documentation_stay_open(locked: TestClient) -> None:
    for prefix in ("", "/v1", "/v2"):
        assert locked.get(f"{prefix}/health/live").status_code == 200
        assert locked.get(f"{prefix}/health/ready").status_code == 200
    assert locked.get("/health").status_code == 200
    for path in ("/docs", "/docs/page.js", "/openapi.json", "/page/main.js", "/page/core/base.css"):
        assert locked.get(path).status_code == 200
    assert locked.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/healthy", "/health/live/x", "/v3/health", "/models%2f..%2fhealth", "/health%0a"])
def test_what_only_looks_like_health_is_closed(locked: TestClient, path: str) -> None:
    assert locked.get(path).status_code == 401


def test_openapi_says_how_to_show_a_key_and_where_none_is_needed(locked: TestClient) -> None:
    document = locked.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["header"]["name"] == "X-API-Key"
    assert document["security"] == [{"bearer": []}, {"header": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == []
    assert "security" not in document["paths"]["/segment"]["post"]


def test_callers_are_named_in_metrics_and_log_and_their_keys_never(
    guarded: Service, locked: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        segment(guarded, BOB)
        locked.get("/models", headers=bearer("stackseg_eve"))
    told, refused = (json.loads(telemetry.JsonFormatter().format(record)) for record in caplog.records)
    assert (told["caller"], told["model"], told["status"], told["route"]) == ("bob", "bands/1", 200, "/segment")
    assert told["stages"].keys() == {"receive", "read", "queue", "windows", "write", "total"}
    assert (refused["caller"], refused["problem"]) == ("nobody", "unauthorized")
    text = locked.get("/metrics", headers=bearer(BOB)).text
    assert 'stackseg_caller_requests_total{caller="bob"}' in text
    assert 'stackseg_errors_total{type="unauthorized"}' in text
    assert "stackseg_eve" not in text + caplog.text
    assert BOB not in text + caplog.text


def test_rate_is_that_of_a_key(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, access={"keys": KEYS, "requests_per_minute": 3}) as service:
        client = service.client
        assert [client.get("/models", headers=bearer(ADA)).status_code for _ in range(3)] == [200] * 3
        refused = client.get("/models", headers=bearer(ADA))
        assert problem_of(refused) == (429, "rate-limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert client.get("/models", headers=bearer(BOB)).status_code == 200
        assert client.get("/health").status_code == 200


def test_requests_at_once_are_those_of_a_key_and_end_with_the_answer(bands_repository: Path, tmp_path: Path) -> None:
    access = {"keys": KEYS, "requests_at_once": 1}
    with start(bands_repository, tmp_path, access=access) as service, ThreadPoolExecutor(2) as pool:
        service.fake.gate.clear()
        first = pool.submit(segment, service, ADA)
        until(lambda: service.runtime.devices.running)
        assert problem_of(service.segment(headers=TIFF | bearer(ADA))) == (429, "rate-limited")
        assert service.client.get("/models", headers=bearer(ADA)).status_code == 200
        other = pool.submit(segment, service, BOB)
        service.fake.gate.set()
        assert [first.result(), other.result(), segment(service, ADA)] == [200] * 3


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("testserver", 200),
        ("testserver:8000", 200),
        ("TESTSERVER.", 200),
        ("a.example.org:80", 200),
        ("example.org", 421),
        ("evil.org", 421),
        ("testserver.evil.org", 421),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("[::2]:80", 421),
        ("10.0.0.1:80", 421),
        ("[", 421),
        ("xexample.org", 421),
        ("", 421),
    ],
)
def test_only_configured_hosts_are_answered_for(locked: TestClient, host: str, status: int) -> None:
    response = locked.get("/models", headers={"Host": host} | bearer(ADA))
    assert response.status_code == status
    if status == 421:
        assert problem_of(response) == (421, "misdirected")
    assert locked.get("/health/live", headers={"Host": host}).status_code == 200


def test_pages_of_a_configured_origin_may_call(locked: TestClient) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-filename"}
    here = locked.options("/segment", headers={"Origin": "https://viewer.example.org"} | asked)
    assert (here.status_code, here.headers["access-control-allow-origin"]) == (200, "https://viewer.example.org")
    answered = locked.get("/models", headers={"Origin": "https://viewer.example.org"} | bearer(ADA))
    readable = set(answered.headers["access-control-expose-headers"].split(", "))
    operations = [it for methods in locked.get("/openapi.json").json()["paths"].values() for it in methods.values()]
    answers = [answer for operation in operations for answer in operation["responses"].values()]
    documented = {name for answer in answers for name in answer.get("headers", {})}
    assert {"X-StackSeg-Objects", "X-StackSeg-Shape"} <= documented <= readable
    refused = locked.get("/models", headers={"Origin": "https://viewer.example.org"})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
    elsewhere = locked.options("/segment", headers={"Origin": "https://evil.org"} | asked)
    assert elsewhere.status_code == 400
    assert "access-control-allow-origin" not in elsewhere.headers


def test_pages_of_other_origins_may_not_call_unless_configured(service: Service) -> None:
    response = service.client.get("/models", headers={"Origin": "https://viewer.example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


ADMINS_ALONE = [("GET", "/status", 200), ("POST", "/models/reload", 200)]


def test_only_admins_do_what_concerns_all(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, access={"keys": KEYS, "admins": ["ada"]}) as service:
        for method, path, done in ADMINS_ALONE:
            for headers in (bearer(BOB), bearer("stackseg_eve"), {}):
                assert problem_of(service.client.request(method, path, headers=headers)) == (401, "unauthorized")
            answer = service.client.request(method, path, headers=bearer(ADA))
            assert (answer.status_code, "ada" in answer.text) == (done, False)


def test_without_keys_only_the_services_own_host_does_what_concerns_all(service: Service) -> None:
    own, other = (TestClient(service.app, client=(host, 1)) for host in ("127.0.0.1", "192.0.2.7"))
    for method, path, done in (*ADMINS_ALONE, ("DELETE", "/models/bands", 409)):
        assert own.request(method, path).status_code == done
        assert problem_of(other.request(method, path)) == (401, "unauthorized")


def test_without_keys_no_key_is_asked_for_or_documented(service: Service) -> None:
    assert service.client.get("/models", headers={"Host": "any.where"} | bearer("whatever")).status_code == 200
    assert "security" not in service.client.get("/openapi.json").json()


def test_every_answer_carries_headers_for_browsers(service: Service) -> None:
    service.fake.error = KeyError("unforeseen")
    crashed = service.segment()
    assert problem_of(crashed) == (500, "internal-error")
    for response in (
        crashed,
        service.client.get("/models"),
        service.client.get("/nowhere"),
        service.client.get("/docs"),
    ):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "default-src 'none'" in crashed.headers["content-security-policy"]
    assert "default-src 'self'" in service.client.get("/docs").headers["content-security-policy"]


@pytest.mark.parametrize("number", ["trace-1.b_C", "0af7651916cd43dd8448eb211c80319c", "x" * 128])
def test_sane_number_of_a_request_is_kept(service: Service, number: str) -> None:
    response = service.client.get("/nowhere", headers={"X-Request-ID": number})
    assert response.headers["x-request-id"] == number
    assert response.json()["instance"].startswith("urn:")


@pytest.mark.parametrize("number", ["", "a b", "x" * 129, "a\tb", "é", "<script>", 'a"b'])
def test_other_numbers_are_replaced(service: Service, number: str) -> None:
    response = service.client.get("/nowhere", headers={"X-Request-ID": number.encode()})
    assert response.headers["x-request-id"] != number
    assert response.json()["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
