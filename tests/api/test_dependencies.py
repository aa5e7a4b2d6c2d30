"""Unknown and repeated query parameters of routes that FastAPI would ignore."""

from __future__ import annotations

import gzip
from http import HTTPStatus

import pytest
from fastapi.routing import APIRoute
from job_service import Service
from live import as_tiff, parse_problem
from pixels import noise

STACK = as_tiff(noise(4, 8, 10))


@pytest.mark.parametrize(
    ("method", "path", "parameter"),
    [
        ("GET", "/jobs/{job}/result?filters=confidence:0.8:", "filters"),
        ("GET", "/jobs/{job}/planes?chanel=1", "chanel"),
        ("GET", "/stacks/{stack}/planes?chanel=1", "chanel"),
        ("GET", "/stacks/{stack}/planes?channel=0&channel=0", "channel"),
        ("GET", "/jobs?limt=1", "limt"),
        ("POST", "/annotations?stack={stack}&ignore_lable=5", "ignore_lable"),
        ("POST", "/annotations?stack={stack}&name=a&name=b", "name"),
        ("GET", "/projects/{job}/table?column=area", "column"),
        ("POST", "/projects?name=embryos", "name"),
        ("PATCH", "/projects/{job}?name=embryos", "name"),
        ("POST", "/trainings?partial=true", "partial"),
        ("POST", "/v2/models/bands/infer?diameter=15px", "diameter"),
    ],
)
def test_unknown_and_repeated_parameters_are_rejected(service: Service, method: str, path: str, parameter: str) -> None:
    ids = {"job": service.submit(STACK)["id"], "stack": service.post("/stacks", STACK).json()["id"]}

    response = service.client.request(method, path.format(**ids), content=STACK if method == "POST" else None)

    assert parse_problem(response) == (422, "bad-parameter")
    assert response.json()["parameter"] == parameter


def test_all_routes_refuse_unknown_parameters_except_those_for_monitoring_and_pages(service: Service) -> None:
    routes: list[APIRoute] = service.app.state.endpoints
    ids = {"name": "bands", "job": service.submit(STACK)["id"], "stack": service.post("/stacks", STACK).json()["id"]}
    open_paths = set()
    for route in routes:
        # The identifiers of other resources do not exist.
        path = route.path.format_map(dict.fromkeys(route.param_convertors, "0" * 32) | ids)
        for method in sorted(route.methods):
            response = service.client.request(method, f"{path}?unknown=1&unknown=2")
            if response.status_code != HTTPStatus.UNPROCESSABLE_ENTITY:
                open_paths.add(route.path)
                assert method in {"GET", "HEAD"}
            elif method != "HEAD":
                assert parse_problem(response) == (422, "bad-parameter"), (method, path)
                assert "unknown" in response.text or path == "/stacks", (method, path)
    assert open_paths == {
        *("/", "/page/{name}", "/page/{folder}/{name}", "/docs", "/docs/{name}", "/openapi.json"),
        *("/health", "/metrics"),
        *(f"{prefix}/health/{name}" for prefix in ("", "/v1", "/v2") for name in ("live", "ready")),
    }
    assert service.client.get(f"/jobs/{ids['job']}").status_code == HTTPStatus.OK


def test_known_parameters_and_repeated_filters_are_accepted(service: Service) -> None:
    job = service.run(STACK)
    query = {"filter": ["label:0:", "num_pixels:0:"]}

    # This result has no table whose rows could be filtered.
    assert "measurements" in service.client.get(f"/jobs/{job['id']}/result", params=query).json()["detail"]
    assert service.client.get("/jobs?limit=1").status_code == 200
    assert service.client.get(f"/jobs/{job['id']}/planes?axis=y&from=0&to=2").status_code == 200


@pytest.mark.parametrize(
    "body", ['{"name": "a", "name": "b"}', '{"name": "a", "add": [{"kind": "job", "id": "1", "id": "2"}]}']
)
def test_repeated_members_of_json_bodies_are_rejected(service: Service, body: str) -> None:
    response = service.client.post("/projects", content=body, headers={"Content-Type": "application/json"})
    assert parse_problem(response) == (422, "bad-parameter")
    assert "is given 2 times" in response.json()["detail"]
    assert service.client.get("/projects").json() == {"projects": []}


def test_compressed_json_bodies_are_rejected(service: Service) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = service.client.post("/projects", content=gzip.compress(b'{"name": "a"}'), headers=headers)
    assert parse_problem(response) == (415, "unsupported-media")
    assert "gzip" in response.json()["detail"]


def test_repeated_list_headers_are_one_list(service: Service) -> None:
    asynchronous = [("Prefer", "wait=10"), ("Prefer", "respond-async"), ("Content-Type", "image/tiff")]
    submitted = service.client.post("/segment", content=STACK, headers=asynchronous)
    assert submitted.status_code == HTTPStatus.ACCEPTED
    job = service.wait(submitted.json(), "done")
    path = f"/jobs/{job['id']}/result"
    accepted = service.client.get(path, headers=[("Accept", "image/png"), ("Accept", "application/x-npy")])
    assert accepted.headers["content-type"] == "application/x-npy"
    etags = [("If-None-Match", '"other"'), ("If-None-Match", service.client.get(path).headers["etag"])]
    assert service.client.get(path, headers=etags).status_code == HTTPStatus.NOT_MODIFIED
