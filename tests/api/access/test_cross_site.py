"""Tests of the protection against requests that web pages of other origins send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from job_service import Service, start_service
from live import STACK, TIFF, parse_problem

from service.api.access.cross_site import SAFE_METHODS

VIEWER = "https://viewer.example.org"
REFUSED = (403, "cross-site")


def list_unsafe_requests(service: Service) -> list[tuple[str, str]]:
    """Return the method and path of all routes that may change something."""
    routes: list[APIRoute] = service.app.state.endpoints
    return [
        (method, route.path.replace("{", "").replace("}", ""))
        for route in routes
        for method in sorted(route.methods - SAFE_METHODS)
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:8888"},
        {"Origin": "http://evil.localhost"},
        {"Origin": "file://localhost"},
        {"Origin": "http://localhost:none"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    ],
)
def test_no_unsafe_route_accepts_requests_of_other_origins(service: Service, headers: dict[str, str]) -> None:
    requests = list_unsafe_requests(service)
    assert {("POST", "/segment"), ("POST", "/models/reload"), ("DELETE", "/stacks/stack")} <= set(requests)
    for method, path in requests:
        response = service.client.request(method, path, headers=TIFF | headers, content=STACK)
        assert parse_problem(response) == REFUSED, (method, path)
    assert service.client.get("/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost"},
        {"Origin": "http://localhost:80"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://stackseg.example.org"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_programs_and_the_web_ui_may_send_unsafe_requests(service: Service, headers: dict[str, str]) -> None:
    assert service.segment(headers=TIFF | headers).status_code == 200


def test_pages_of_other_origins_may_send_safe_requests(service: Service) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    response = service.client.get("/models", headers=headers)
    assert (response.status_code, "access-control-allow-origin" in response.headers) == (200, False)
    assert service.client.head("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("access", "headers", "is_accepted"),
    [
        ({"origins": [VIEWER]}, {"Origin": VIEWER, "Sec-Fetch-Site": "cross-site"}, True),
        ({"origins": [VIEWER]}, {"Origin": VIEWER}, True),
        ({"origins": [VIEWER]}, {"Origin": VIEWER + ".evil.example"}, False),
        ({"origins": [VIEWER]}, {"Sec-Fetch-Site": "cross-site"}, False),
        ({"origins": ["*"]}, {"Origin": "https://any.example", "Sec-Fetch-Site": "cross-site"}, True),
        # A proxy replaces the Host header. The browser does not send Sec-Fetch-Site, because the page is not secure.
        ({"hosts": ["lab-gpu"]}, {"Origin": "http://lab-gpu"}, True),
        ({"hosts": ["lab-gpu"]}, {"Origin": "https://LAB-GPU:443".lower()}, True),
        ({"hosts": ["lab-gpu"]}, {"Origin": "http://lab-gpu:8888"}, False),
        ({"hosts": ["*.example.org"]}, {"Origin": "http://other.example.org"}, False),
        # A proxy keeps the Host header, including a port.
        ({"hosts": ["lab-gpu"]}, {"Origin": "https://lab-gpu:8443", "Host": "lab-gpu:8443"}, True),
        ({"hosts": ["*.example.org"]}, {"Origin": "http://a.example.org", "Host": "a.example.org"}, True),
        ({"hosts": ["::1"]}, {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"}, True),
    ],
)
def test_configured_origins_and_host_names_are_accepted(
    bands_repository: Path, tmp_path: Path, access: dict[str, Any], headers: dict[str, str], is_accepted: bool
) -> None:
    with start_service(bands_repository, tmp_path, access=access) as service:
        response = service.segment(headers=TIFF | headers)
    if is_accepted:
        assert response.status_code == 200
    else:
        assert parse_problem(response) == REFUSED
