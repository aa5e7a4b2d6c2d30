from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
from fakes import FakeSegmenter, until
from live import as_tiff
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from service.api.app import create_app
from service.api.problems import STATUS, status_of
from service.api.server import format_address, listen
from service.core import errors
from service.core.config import Settings
from service.serving.parameters import Query
from service.serving.runtime import Runtime

TIFF = {"Content-Type": "image/tiff"}
STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))


class Service:
    """The application with a fake segmenter, called without a socket."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        settings = Settings.model_validate(
            {"models": {"folder": folder}, "server": {"scratch_folder": scratch}, "limits": {"cache_bytes": 0}}
        )
        self.app = create_app(settings)
        self.runtime = self.app.state.runtime = Runtime(settings, FakeSegmenter)
        self.client = TestClient(self.app, raise_server_exceptions=False)

    def fake(self) -> FakeSegmenter:
        until(lambda: self.runtime.unready_reasons() == ())
        fake: Any = self.runtime.models.segmenter(None)
        fake.error, fake.notes = None, ()
        return fake


@pytest.fixture(scope="module")
def service(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(bands_repository, tmp_path_factory.mktemp("scratch"))
    with running.client:
        running.fake()
        yield running


def concrete(kind: type[errors.StackSegError]) -> errors.StackSegError:
    match kind:
        case errors.QueueFull | errors.NotReady | errors.RateLimited:
            return kind("try later", 7)
        case errors.OutOfMemory:
            return kind("too much", 123)
    return kind("what to do")


def tree(kind: type[errors.StackSegError]) -> list[type[errors.StackSegError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.BadFile, 422),
        (errors.AmbiguousAxes, 422),
        (errors.BadParameter, 422),
        (errors.UnsupportedMedia, 415),
        (errors.TooLarge, 413),
        (errors.UnknownModel, 404),
        (errors.Unauthorized, 401),
        (errors.Misdirected, 421),
        (errors.RateLimited, 429),
        (errors.DeviceLost, 503),
        (errors.QueueFull, 503),
        (errors.NotReady, 503),
        (errors.TimedOut, 504),
        (errors.OutOfMemory, 507),
        (errors.OutOfStorage, 507),
        (errors.BrokenModel, 500),
        (errors.NonFiniteScores, 500),
        (errors.ConfigError, 500),
        (errors.Cancelled, 499),
    ],
)
def test_every_error_has_its_status(kind: type[errors.StackSegError], status: int) -> None:
    assert status_of(concrete(kind)) == status


def test_class_without_a_row_has_its_parents_status() -> None:
    class Cracked(errors.UnsupportedMedia):
        pass

    assert Cracked not in STATUS
    assert status_of(Cracked("odd")) == 415


# Never answered, and never answered by a service that goes on.
ELSEWHERE = (errors.Cancelled, errors.DeviceLost)


@pytest.mark.parametrize("kind", [kind for kind in tree(errors.StackSegError) if kind not in ELSEWHERE])
def test_error_of_the_device_becomes_its_problem_document(service: Service, kind: type[errors.StackSegError]) -> None:
    fake = service.fake()
    fake.error = concrete(kind)
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    problem = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"urn:stackseg:problem:{kind.slug}"
    assert problem["status"] == response.status_code == status_of(fake.error)
    assert problem["detail"] == str(fake.error)
    assert problem["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
    assert problem.get("needed_bytes") == (123 if kind is errors.OutOfMemory else None)
    assert response.headers.get("retry-after") == (
        str(fake.error.retry_after) if hasattr(fake.error, "retry_after") else None
    )
    assert list(service.runtime.scratch.requests.iterdir()) == []


def test_lost_device_ends_readiness_and_asks_to_come_again(bands_repository: Path, tmp_path: Path) -> None:
    running = Service(bands_repository, tmp_path)
    with running.client as client:
        running.fake().error = errors.DeviceLost("cuda:0 has failed.")
        response = client.post("/segment", content=STACK, headers=TIFF)
        assert (response.status_code, response.json()["type"]) == (503, "urn:stackseg:problem:device-lost")
        assert response.headers["retry-after"] == "60"
        until(lambda: client.get("/health/ready").status_code == 503)
        assert client.get("/health/live").status_code == 200


def test_work_given_up_by_the_service_is_answered_not_dropped(service: Service) -> None:
    service.fake().error = errors.Cancelled("given up")
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert (response.status_code, response.json()["type"]) == (503, "urn:stackseg:problem:not-ready")


def test_unforeseen_error_tells_a_number_and_no_secrets(service: Service) -> None:
    service.fake().error = KeyError("the password")
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert (response.status_code, response.json()["type"]) == (500, "urn:stackseg:problem:internal-error")
    assert "password" not in response.text
    assert response.json()["instance"].startswith("urn:uuid:")
    assert list(service.runtime.scratch.requests.iterdir()) == []


def test_wrong_path_and_method_are_problem_documents(service: Service) -> None:
    missing, wrong = service.client.get("/nowhere"), service.client.get("/segment")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:stackseg:problem:not-found")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "urn:stackseg:problem:method-not-allowed")
    assert wrong.headers["allow"] == "POST"
    assert service.client.put("/jobs").headers["allow"] == "GET, POST"


def test_one_line_in_the_log_per_request(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.fake()
    with caplog.at_level(logging.INFO, "service.access"):
        response = service.client.post("/segment", content=STACK, headers=TIFF)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    for part in ("POST /segment 200", response.headers["x-request-id"], "bands/1"):
        assert part in line


def test_line_in_the_log_cannot_be_forged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        service.client.get("/nowhere%0aPOST%20/segment%20200")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    assert "\n" not in line


def test_requests_are_counted_by_route_not_by_path(service: Service) -> None:
    service.client.get("/models/bands")
    service.client.get("/models/made-up-by-a-stranger")
    text = service.client.get("/metrics").text
    assert 'stackseg_requests_total{route="/models/{name}",status="404"}' in text
    assert "stranger" not in text


def test_dashboard_asks_for_metrics_and_labels_that_there_are(service: Service) -> None:
    service.fake()
    service.client.post("/segment", content=STACK, headers=TIFF)
    service.client.get("/nowhere")
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(service.client.get("/metrics").text):
        # Where nothing has been counted yet, or no GPU is there, the family is shown without samples.
        names = {f"{family.name}_total"} if family.type == "counter" else {family.name}
        for name in names | {sample.name for sample in family.samples}:
            shown[name] = {label for sample in family.samples if sample.name == name for label in sample.labels}
    dashboard = json.loads((ROOT / "docker" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= len(dashboard["panels"]) > 0
    for query in queries:
        asked = re.findall(r"(\w+)\{", query)
        assert asked
        assert set(asked) <= shown.keys(), query
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        selected = set(re.findall(r"[{,](\w+)=", query)) - {"job"}
        known = [shown[name] for name in asked if shown[name]]
        assert all(grouped | selected <= labels for labels in known), query


def test_metrics_name_what_operators_are_promised(service: Service) -> None:
    text = service.client.get("/metrics").text
    for name in ("process_resident_memory_bytes", "stackseg_running", "stackseg_waiting", "stackseg_compiled_graphs"):
        assert re.search(rf"^{name} \d", text, re.MULTILINE), name


def test_documented_errors_are_those_that_occur(service: Service) -> None:
    document = service.client.get("/openapi.json").json()
    responses = document["paths"]["/segment"]["post"]["responses"]
    possible = {str(status_of(concrete(kind))) for kind in tree(errors.StackSegError)} - {"400", "499"}
    assert possible | {"200", "202"} == set(responses)
    for status in possible:
        (media,) = responses[status]["content"]
        assert media == "application/problem+json"


@pytest.mark.parametrize("path", ["/segment", "/inspect", "/jobs"])
def test_documented_parameters_are_those_that_are_taken(service: Service, path: str) -> None:
    document = service.client.get("/openapi.json").json()
    documented = document["paths"][path]["post"]["parameters"]
    assert [one["name"] for one in documented if one["in"] == "query"] == list(Query.model_fields)
    for one in documented:
        assert one["description"]
        assert (one["required"], "anyOf" in one["schema"]) == (False, True)
    assert "There is no parameter 'overlaps'" in service.client.post(f"{path}?overlaps=1").json()["detail"]


def test_documented_headers_are_those_that_come(service: Service) -> None:
    service.fake().notes = ("a note",)
    document = service.client.get("/openapi.json").json()
    documented = document["paths"]["/segment"]["post"]["responses"]["200"]["headers"].keys()
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert {name for name in documented if name not in response.headers} == {
        "X-StackSeg-Objects",
        "X-StackSeg-Diameter",
        "X-StackSeg-Skipped",
        "X-Cache",
    }


@pytest.mark.parametrize("path", ["/health", "/health/live", "/models", "/models/bands", "/gpu"])
def test_answers_have_the_documented_members(service: Service, path: str) -> None:
    document = service.client.get("/openapi.json").json()
    template = "/models/{name}" if path == "/models/bands" else path
    content = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert service.client.get(path).json().keys() == schema["properties"].keys()


def test_endpoints_are_summed_up_in_words_of_their_own(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    assert paths["/segment"]["post"]["summary"] == "Segment a 3D stack"
    assert paths["/health/live"]["get"]["summary"] == "200 as long as the process answers"


def test_front_page_leads_to_the_documentation(service: Service) -> None:
    assert service.client.get("/", follow_redirects=False).headers["location"] == "/docs"


def test_the_documentation_loads_nothing_from_elsewhere(service: Service) -> None:
    page = service.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(addresses) == 5
    for address in addresses:
        assert "//" not in address
        part = service.client.get(urljoin("/docs", address))
        assert part.status_code == 200
        assert part.content
    start = service.client.get("/docs/start.js").text
    assert "openapi.json" in start
    assert "//" not in start
    assert service.client.get("/docs/__init__.py").json()["type"].endswith("not-found")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_port_zero_takes_a_free_port_and_tells_it(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert format_address(listener) == (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def test_address_in_use_is_a_configuration_error() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(errors.ConfigError, match="Cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1])
