"""Tests of GET /status."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fakes import FakeSegmenter, wait_until
from live import LiveServer, make_live_fixture, parse_problem

from service.serving.metrics import MAX_RECENT_SEGMENTATIONS

live = make_live_fixture(load=FakeSegmenter, limits={"at_once": 1})


def test_status_lists_running_waiting_and_finished_requests(live: LiveServer) -> None:
    def status() -> dict[str, Any]:
        return dict(live.client.get("/status").json())

    live.fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(live.segment) for _ in range(2)]
        try:
            wait_until(lambda: [request["state"] for request in status()["requests"]] == ["running", "waiting"])
            running, waiting = status()["requests"]
        finally:
            live.fake.gate.set()
        assert [request.result().status_code for request in requests] == [200, 200]
    assert {running["model"], waiting["model"]} == {"bands"}
    assert running["device"] == live.runtime.devices.all[0].name
    assert running["progress"]["total"] >= waiting["progress"]["total"] > 0
    assert running["seconds"] > 0
    report = status()
    assert report["requests"] == []
    assert len(report["recent"]) == 2
    newest, previous = report["recent"]
    assert newest["ended"] >= previous["ended"]
    assert (newest["model"], newest["voxels"]) == ("bands", 3 * 8 * 8)
    assert list(newest["seconds"])[:3] == ["receive", "read", "queue"]
    assert newest["seconds"]["windows"] == 0.5


def test_status_includes_the_content_of_health_gpu_and_models(live: LiveServer) -> None:
    report = live.client.get("/status").json()
    assert report["models"] == live.client.get("/models").json()
    assert report["hardware"]["devices"] == live.client.get("/gpu").json()["devices"]
    assert report["health"]["status"] == live.client.get("/health").json()["status"]
    assert report["cpu_seconds"] > 0


def test_number_of_recent_segmentations_is_limited(live: LiveServer) -> None:
    for voxels in range(MAX_RECENT_SEGMENTATIONS + 5):
        live.runtime.metrics.count_segmentation("bands", voxels, None, {})
    recent = live.client.get("/status").json()["recent"]
    assert [segmentation["voxels"] for segmentation in recent] == list(range(MAX_RECENT_SEGMENTATIONS + 4, 4, -1))


def test_forwarded_requests_do_not_count_as_local(live: LiveServer) -> None:
    assert parse_problem(live.client.get("/status", headers={"X-Forwarded-For": "192.0.2.7"})) == (401, "unauthorized")
