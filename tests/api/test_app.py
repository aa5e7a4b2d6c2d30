from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fakes import FakeSegmenter, wait_until
from job_service import Service
from live import STACK, TIFF, LiveServer, eager_settings, make_live_fixture, parse_problem, serve
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from service.core.errors import ResultUnavailable
from service.serving.parameters import Query


def test_each_request_writes_one_log_line(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        response = service.segment()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    for part in ("POST /segment 200", response.headers["x-request-id"], "bands/1"):
        assert part in line


def test_log_lines_cannot_be_forged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "service.access"):
        service.client.get("/nowhere%0aPOST%20/segment%20200")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    assert "\n" not in line


def test_log_lines_and_error_responses_stay_short_for_long_input(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    long = "x" * 30_000
    with caplog.at_level(logging.DEBUG):
        responses = [
            service.client.get(f"/{long}"),
            service.client.get(f"/models/{long}"),
            service.client.get(f"/jobs/{long}"),
            service.client.get(f"/jobs?limit={long}"),
            service.client.post("/segment", content=STACK, headers={"Content-Type": long}),
            service.client.post("/segment", content=STACK, headers={"Content-Encoding": long}),
            service.client.post("/segment", content=STACK, headers=TIFF | {"X-Filename": long, "X-Request-ID": long}),
            service.client.get("/nowhere", headers={"Host": "[" + long}),
        ]
    assert {response.status_code for response in responses} == {404, 421, 422, 415, 200}
    assert max(len(response.content) for response in responses if response.is_error) < 3000
    service_records = [record for record in caplog.records if record.name.startswith("service")]
    assert len(service_records) >= len(responses)
    assert max(len(record.getMessage()) for record in service_records) < 1000


def test_requests_are_counted_by_route_not_by_path(service: Service) -> None:
    service.client.get("/models/bands")
    service.client.get("/models/made-up-by-a-stranger")
    text = service.client.get("/metrics").text
    assert 'stackseg_requests_total{route="/models/{name}",status="404"}' in text
    assert "stranger" not in text


def test_dashboard_uses_existing_metrics_and_labels(service: Service) -> None:
    service.segment()
    service.client.get("/nowhere")
    metric_labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(service.client.get("/metrics").text):
        # A metric without any counts or without a GPU has no samples.
        names = {f"{family.name}_total"} if family.type == "counter" else {family.name}
        for name in names | {sample.name for sample in family.samples}:
            metric_labels[name] = {label for sample in family.samples if sample.name == name for label in sample.labels}
    dashboard = json.loads((ROOT / "docker" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= len(dashboard["panels"]) > 0
    for query in queries:
        used = re.findall(r"(\w+)\{", query)
        assert used
        assert set(used) <= metric_labels.keys(), query
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        selected = set(re.findall(r"[{,](\w+)=", query)) - {"job"}
        existing = [metric_labels[name] for name in used if metric_labels[name]]
        assert all(grouped | selected <= labels for labels in existing), query


def test_documented_metrics_exist(service: Service) -> None:
    text = service.client.get("/metrics").text
    for name in ("process_resident_memory_bytes", "stackseg_running", "stackseg_waiting", "stackseg_compiled_graphs"):
        assert re.search(rf"^{name} \d", text, re.MULTILINE), name


@pytest.mark.parametrize("path", ["/segment", "/inspect", "/jobs"])
def test_documented_parameters_match_the_accepted_parameters(service: Service, path: str) -> None:
    document = service.client.get("/openapi.json").json()
    documented = document["paths"][path]["post"]["parameters"]
    assert [parameter["name"] for parameter in documented if parameter["in"] == "query"] == list(Query.model_fields)
    for parameter in documented:
        assert parameter["description"]
        assert (parameter["required"], "anyOf" in parameter["schema"]) == (False, True)
    assert "Unknown parameter 'overlaps'" in service.client.post(f"{path}?overlaps=1").json()["detail"]


def test_response_has_the_documented_headers(service: Service) -> None:
    service.fake.notes = ("a note",)
    document = service.client.get("/openapi.json").json()
    documented = document["paths"]["/segment"]["post"]["responses"]["200"]["headers"].keys()
    response = service.segment()
    assert {name for name in documented if name not in response.headers} == {
        "X-StackSeg-Objects",
        "X-StackSeg-Diameter",
        "X-StackSeg-Skipped",
        "X-StackSeg-Confidence",
        "X-StackSeg-Warning",
        "X-Cache",
    }


@pytest.mark.parametrize("path", ["/health", "/health/live", "/models", "/models/bands", "/gpu"])
def test_responses_have_the_documented_members(service: Service, path: str) -> None:
    document = service.client.get("/openapi.json").json()
    template = "/models/{name}" if path == "/models/bands" else path
    content = document["paths"][template]["get"]["responses"]["200"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert service.client.get(path).json().keys() == schema["properties"].keys()


def test_endpoints_have_summaries_from_their_docstrings(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    assert paths["/segment"]["post"]["summary"] == "Segment a 3D stack"
    assert paths["/health/live"]["get"]["summary"] == "Check that the process responds"


live = make_live_fixture(load=FakeSegmenter)


def test_head_has_the_headers_of_get_wherever_get_is_answered(live: LiveServer) -> None:
    """The server, and not the application, removes the content."""
    job, stack = live.run()["id"], live.post("/stacks", STACK).json()["id"]
    names = {"{job}": job, "{stack}": stack, "{name}": "bands"}
    paths = [path for path, methods in live.client.get("/openapi.json").json()["paths"].items() if "get" in methods]
    paths += ["/", "/docs", "/docs/page.js", "/openapi.json", "/page/main.js", "/v2/health/ready", "/nowhere"]
    for template in paths:
        path = template
        for name, value in names.items():
            path = path.replace(name, value)
        response, head = live.client.get(path), live.client.head(path)
        assert (head.status_code, head.content) == (response.status_code, b""), path
        assert head.headers["content-type"] == response.headers["content-type"], path
        if "/events" not in path and "/metrics" not in path and response.status_code == 200:
            lengths = [int(headers.get("content-length", -1)) for headers in (head.headers, response.headers)]
            assert abs(lengths[0] - lengths[1]) < 20, path
    assert int(live.client.head(f"/jobs/{job}/result").headers["content-length"]) == len(
        live.result({"id": job}).content
    )


def test_head_of_events_does_not_wait_for_the_job(live: LiveServer) -> None:
    live.fake.gate.clear()
    try:
        job = live.submit()["id"]
        assert live.client.head(f"/jobs/{job}/events", timeout=10).status_code == 200
    finally:
        live.fake.gate.set()


def test_methods_that_a_path_does_not_support_are_listed(live: LiveServer) -> None:
    refused = live.client.put("/jobs", content=b"")
    assert parse_problem(refused) == (405, "method-not-allowed")
    assert refused.headers["allow"] == "GET, HEAD, POST"
    assert "The methods of this path are GET, HEAD, POST." in refused.json()["detail"]
    assert live.client.head("/segment").headers["allow"] == "POST"


def test_failed_preconditions_name_the_header(live: LiveServer) -> None:
    refused = live.result(live.run(), **{"If-Match": '"other"'})
    assert parse_problem(refused) == (412, "precondition-failed")
    assert "If-Match" in refused.json()["detail"]


def test_range_errors_are_problem_documents(live: LiveServer) -> None:
    job = live.run()
    length = len(live.result(job).content)
    beyond = live.result(job, Range=f"bytes={length}-")
    assert parse_problem(beyond) == (416, "range-not-satisfiable")
    assert beyond.headers["content-range"] == f"bytes */{length}"
    assert "bytes=100-199" in beyond.json()["detail"]
    page = live.client.get("/docs/page.js", headers={"Range": "bytes=a-b"})
    assert parse_problem(page) == (416, "range-not-satisfiable")


# Errors while the content of a response is sent, and the problem in the access log. None: the error is a bug.
LATE_ERRORS = (
    (OSError(errno.EIO, "Input/output error"), "storage-unavailable"),
    (MemoryError(), "out-of-memory"),
    (RuntimeError("can't start new thread"), "out-of-memory"),
    (ResultUnavailable("The result has expired."), ResultUnavailable.slug),
    (FileNotFoundError(errno.ENOENT, "No such file"), "storage-unavailable"),
    (TypeError("a bug"), None),
    (RuntimeError("another bug"), None),
)


@pytest.fixture(scope="module")
def broken_server(bands_repository: Path) -> Iterator[LiveServer]:
    """A service with a route whose response fails after its first chunk or, with a file, after its head."""

    async def respond(request: Request) -> Response:
        error = LATE_ERRORS[request.path_params["index"]][0]

        async def iterate() -> AsyncIterator[bytes]:
            yield b"first"
            raise error

        if "file" in request.query_params:
            status = Path(__file__).stat()
            return FileResponse("/deleted/in/the/meantime", stat_result=status)
        length = {"Content-Length": "100"} if "length" in request.query_params else {}
        return StreamingResponse(iterate(), headers=length)

    with serve(eager_settings(bands_repository), load=FakeSegmenter) as live:
        application: Any = live.server.config.app
        application.app.router.routes.insert(0, Route("/broken/{index:int}", respond))
        yield live


@pytest.mark.parametrize("index", range(len(LATE_ERRORS)))
@pytest.mark.parametrize("kind", ["length", "chunks"])
def test_response_that_cannot_be_completed_ends_without_a_traceback(
    broken_server: LiveServer, caplog: pytest.LogCaptureFixture, index: int, kind: str
) -> None:
    problem = LATE_ERRORS[index][1]
    with caplog.at_level(logging.INFO), pytest.raises(httpx2.RemoteProtocolError):
        broken_server.client.get(f"/broken/{index}", params={kind: ""})
    wait_until(lambda: any(record.name == "service.access" for record in caplog.records))
    tracebacks = [record for record in caplog.records if record.exc_info]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "service.access"]
    assert bool(tracebacks) == (problem is None)
    assert (problem or "GET /broken") in line


def test_file_that_was_deleted_before_it_was_sent_ends_the_response(
    broken_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(httpx2.RemoteProtocolError):
        broken_server.client.get("/broken/0", params={"file": ""})
    assert not [record for record in caplog.records if record.exc_info]
    assert "/deleted" in caplog.text
