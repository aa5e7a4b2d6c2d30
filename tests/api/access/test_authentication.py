"""The way in, with a fake segmenter behind it: keys, limits, hosts, CORS, and what every answer carries."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import until
from live import as_tiff
from runtimes import FAKE_PARTS, loaded_segmenter
from starlette.testclient import TestClient

from service.api.access.authentication import extract_key
from service.api.access.keys import hash_key
from service.api.access.trusted_hosts import matches_host, parse_host
from service.api.app import create_app
from service.core import telemetry
from service.core.config import Settings

ADA, BOB = "stackseg_ada", "stackseg_bob"
KEYS = {"ada": hash_key(ADA), "bob": hash_key(BOB)}
STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))
TIFF = {"Content-Type": "image/tiff"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def service(repository: Path, scratch: Path, **access: Any) -> Iterator[TestClient]:
    settings = Settings.model_validate(
        {
            "models": {"folder": repository},
            "server": {"scratch_folder": scratch},
            "limits": {"cache_bytes": 0},
            "access": access,
        }
    )
    app = create_app(settings, FAKE_PARTS)
    with TestClient(app, raise_server_exceptions=False) as client:
        until(lambda: app.state.runtime.unready_reasons() == ())
        yield client


@pytest.fixture(scope="module")
def locked(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    access = {"keys": KEYS, "hosts": ["testserver", "*.example.org"], "origins": ["https://viewer.example.org"]}
    with service(bands_repository, tmp_path_factory.mktemp("scratch"), **access) as client:
        yield client


def problem_of(response: Any) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-request-id"] in response.json()["instance"]
    return response.status_code, response.json()["type"].removeprefix("urn:stackseg:problem:")


@pytest.mark.parametrize("headers", [bearer(ADA), {"Authorization": f"bearer  {ADA} "}, {"X-API-Key": ADA}])
def test_known_key_is_let_in(locked: TestClient, headers: dict[str, str]) -> None:
    response = locked.post("/segment", content=STACK, headers=TIFF | headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("stackseg_eve"),
        bearer(""),
        {"X-API-Key": "é"},
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
    response = locked.request(method, path, content=STACK if method == "POST" else None, headers=encoded)
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
    locked: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        locked.post("/segment", content=STACK, headers=TIFF | bearer(BOB))
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
    with service(bands_repository, tmp_path, keys=KEYS, requests_per_minute=3) as client:
        statuses = [client.get("/models", headers=bearer(ADA)).status_code for _ in range(3)]
        assert statuses == [200] * 3
        refused = client.get("/models", headers=bearer(ADA))
        assert problem_of(refused) == (429, "rate-limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert client.get("/models", headers=bearer(BOB)).status_code == 200
        assert client.get("/health").status_code == 200


def test_requests_at_once_are_those_of_a_key_and_end_with_the_answer(bands_repository: Path, tmp_path: Path) -> None:
    with service(bands_repository, tmp_path, keys=KEYS, requests_at_once=1) as client:
        fake: Any = loaded_segmenter(client.app.state.runtime.models, None)  # type: ignore[attr-defined]
        fake.gate.clear()
        statuses: list[int] = []

        def post() -> None:
            statuses.append(client.post("/segment", content=STACK, headers=TIFF | bearer(ADA)).status_code)

        first = threading.Thread(target=post)
        first.start()
        until(lambda: client.app.state.runtime.devices.running)  # type: ignore[attr-defined]
        refused = client.post("/segment", content=STACK, headers=TIFF | bearer(ADA))
        assert problem_of(refused) == (429, "rate-limited")
        assert client.get("/models", headers=bearer(ADA)).status_code == 200
        other = threading.Thread(target=lambda: client.post("/segment", content=STACK, headers=TIFF | bearer(BOB)))
        other.start()
        fake.gate.set()
        first.join()
        other.join()
        assert statuses == [200]
        post()
        assert statuses == [200, 200]


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
        ("[::1]:80", 421),
        ("", 421),
    ],
)
def test_only_configured_hosts_are_answered_for(locked: TestClient, host: str, status: int) -> None:
    response = locked.get("/models", headers={"Host": host} | bearer(ADA))
    assert response.status_code == status
    if status == 421:
        assert problem_of(response) == (421, "misdirected")
    assert locked.get("/health/live", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("header", "host"),
    [("[::1]:8000", "::1"), ("[::1]", "::1"), ("10.0.0.1:80", "10.0.0.1"), ("A.Org", "a.org"), ("", ""), ("[", "")],
)
def test_host_of_a_header(header: str, host: str) -> None:
    assert parse_host(header) == host


def test_pattern_is_for_what_lies_below_it() -> None:
    assert matches_host("a.b.org", "*.b.org")
    assert not matches_host("b.org", "*.b.org")
    assert not matches_host("xb.org", "*.b.org")


def test_bearer_goes_before_the_other_header() -> None:
    assert extract_key([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")]) == "a"
    assert extract_key([(b"authorization", b"Basic a"), (b"x-api-key", b"b")]) == "b"
    assert extract_key([]) is None


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


@pytest.fixture(scope="module")
def open_to_all(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with service(bands_repository, tmp_path_factory.mktemp("scratch")) as client:
        yield client


def test_pages_of_other_origins_may_not_call_unless_configured(open_to_all: TestClient) -> None:
    response = open_to_all.get("/models", headers={"Origin": "https://viewer.example.org"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_without_keys_no_key_is_asked_for_or_documented(open_to_all: TestClient) -> None:
    assert open_to_all.get("/models", headers={"Host": "any.where"} | bearer("whatever")).status_code == 200
    assert "security" not in open_to_all.get("/openapi.json").json()


def test_every_answer_carries_headers_for_browsers(open_to_all: TestClient) -> None:
    fake: Any = loaded_segmenter(open_to_all.app.state.runtime.models, None)  # type: ignore[attr-defined]
    fake.error = KeyError("unforeseen")
    crashed = open_to_all.post("/segment", content=STACK, headers=TIFF)
    fake.error = None
    assert problem_of(crashed) == (500, "internal-error")
    for response in (crashed, open_to_all.get("/models"), open_to_all.get("/nowhere"), open_to_all.get("/docs")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "default-src 'none'" in crashed.headers["content-security-policy"]
    assert "default-src 'self'" in open_to_all.get("/docs").headers["content-security-policy"]


@pytest.mark.parametrize("number", ["trace-1.b_C", "0af7651916cd43dd8448eb211c80319c", "x" * 128])
def test_sane_number_of_a_request_is_kept(open_to_all: TestClient, number: str) -> None:
    response = open_to_all.get("/nowhere", headers={"X-Request-ID": number})
    assert response.headers["x-request-id"] == number
    assert response.json()["instance"].startswith("urn:")


@pytest.mark.parametrize("number", ["", "a b", "x" * 129, "a\tb", "é", "<script>", 'a"b'])
def test_other_numbers_are_replaced(open_to_all: TestClient, number: str) -> None:
    response = open_to_all.get("/nowhere", headers={"X-Request-ID": number.encode()})
    assert response.headers["x-request-id"] != number
    assert response.json()["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
