"""Tests of the protection against DNS rebinding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from job_service import Service, start_service
from live import parse_problem

from service.api.access.keys import hash_key

KEY = "stackseg_ada"
KEYS = {"ada": hash_key(KEY)}
# Settings, and for each host name whether requests for it are accepted.
CASES: list[tuple[dict[str, Any], dict[str, bool]]] = [
    (
        {},
        {
            "localhost": True,
            "LOCALHOST.": True,
            "localhost:9999": True,
            "app.localhost": True,
            "127.0.0.1:8000": True,
            "127.5.6.7": True,
            "[::1]:8000": True,
            "evil.example": False,
            "127.0.0.1.evil.example": False,
            "localhost.evil.example": False,
            "notlocalhost": False,
            "192.0.2.1": False,
            "[": False,
            "": False,
        },
    ),
    ({"server": {"host": "lab-gpu"}}, {"lab-gpu:8000": True, "localhost": True, "lab-gpu.evil.example": False}),
    (
        {"server": {"host": "0.0.0.0"}},
        {"192.0.2.1:8000": True, "[2001:db8::1]": True, "localhost": True, "lab-gpu": False, "evil.example": False},
    ),
    ({"server": {"host": "192.0.2.1"}}, {"192.0.2.1": True, "192.0.2.2": False}),
    ({"access": {"hosts": ["lab-gpu"]}}, {"lab-gpu": True, "localhost": True, "evil.example": False}),
    (
        {"server": {"host": "::"}, "access": {"keys": KEYS, "hosts": ["lab-gpu"]}},
        {"192.0.2.1:8000": True, "lab-gpu": True, "localhost": False, "evil.example": False},
    ),
    ({"access": {"keys": KEYS}}, {"localhost": True, "any.example": True, "": True}),
    (
        {"access": {"keys": KEYS, "hosts": ["lab-gpu", "*.example.org", "::1"]}},
        {
            "lab-gpu": True,
            "lab-gpu:8000": True,
            "LAB-GPU.": True,
            "a.example.org:80": True,
            "[::1]:80": True,
            "[::1]": True,
            "example.org": False,
            "xexample.org": False,
            "lab-gpu.evil.example": False,
            "[::2]:80": False,
            "10.0.0.1:80": False,
            "localhost": False,
            "": False,
        },
    ),
]


@pytest.mark.parametrize(("settings", "hosts"), CASES)
def test_only_requests_for_trusted_host_names_are_accepted(
    bands_repository: Path, tmp_path: Path, settings: dict[str, Any], hosts: dict[str, bool]
) -> None:
    with start_service(bands_repository, tmp_path, **settings) as service:
        for host, is_trusted in hosts.items():
            headers = {"Host": host, "X-API-Key": KEY}
            response = service.client.get("/models", headers=headers)
            assert response.status_code == (200 if is_trusted else 421), host
            if not is_trusted:
                assert parse_problem(response) == (421, "misdirected")
            assert service.client.get("/health/live", headers=headers).status_code == 200


@pytest.mark.parametrize(("hosts", "warnings"), [([], 1), (["lab-gpu"], 0)])
def test_log_warns_once_if_keys_are_used_without_host_names(
    bands_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, hosts: list[str], warnings: int
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        start_service(bands_repository, tmp_path, access={"keys": KEYS, "hosts": hosts}) as service,
    ):
        for _ in range(3):
            service.client.get("/models")
    assert sum("access.hosts is empty" in message for message in caplog.messages) == warnings


def test_page_of_a_rebound_name_can_neither_read_nor_write(service: Service) -> None:
    job = service.run()
    for method, path in [
        ("GET", "/"),
        ("GET", "/jobs"),
        ("GET", f"/jobs/{job['id']}/result"),
        ("GET", "/status"),
        ("POST", "/segment"),
        ("DELETE", f"/jobs/{job['id']}"),
    ]:
        headers = {"Host": "evil.example", "Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"}
        assert parse_problem(service.client.request(method, path, headers=headers)) == (421, "misdirected")
    assert service.show(job)["state"] == "done"
