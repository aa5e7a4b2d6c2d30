"""What an admin is told of a service that works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeSegmenter, until
from live import Live, as_tiff, eager, serve
from runtimes import loaded_segmenter

from service.api.access.keys import generate_key, hash_key
from service.serving.metrics import RECENT

STACK = as_tiff(np.full((4, 16, 16), 200, np.uint8))


@pytest.fixture(scope="module")
def live(bands_repository: Path) -> Iterator[Live]:
    settings = eager(bands_repository, limits={"at_once": 1})
    with serve(settings, load=FakeSegmenter) as live:  # type: ignore[arg-type]
        yield live


def test_requests_are_seen_running_waiting_and_with_their_stages_once_they_have_ended(live: Live) -> None:
    def status() -> dict[str, Any]:
        return dict(live.client.get("/status").json())

    fake: Any = loaded_segmenter(live.runtime.models, None)
    fake.gate.clear()
    requests = [threading.Thread(target=live.segment, args=(STACK,)) for _ in range(2)]
    try:
        for request in requests:
            request.start()
        until(lambda: [one["state"] for one in status()["requests"]] == ["running", "waiting"])
        running, waiting = status()["requests"]
    finally:
        fake.gate.set()
        for request in requests:
            request.join()
    assert {running["model"], waiting["model"]} == {"bands"}
    assert running["device"] == live.runtime.devices.all[0].name
    assert running["progress"]["total"] >= waiting["progress"]["total"] > 0
    assert running["seconds"] > 0
    seen = status()
    assert seen["requests"] == []
    assert len(seen["recent"]) == 2
    newest, before = seen["recent"]
    assert newest["ended"] >= before["ended"]
    assert (newest["model"], newest["voxels"]) == ("bands", 4 * 16 * 16)
    assert list(newest["seconds"])[:3] == ["receive", "read", "queue"]
    assert newest["seconds"]["windows"] == 0.5


def test_what_other_addresses_tell_is_the_same_here(live: Live) -> None:
    seen = live.client.get("/status").json()
    assert seen["models"] == live.client.get("/models").json()
    assert seen["hardware"]["devices"] == live.client.get("/gpu").json()["devices"]
    assert seen["health"]["status"] == live.client.get("/health").json()["status"]
    assert seen["cpu_seconds"] > 0


def test_only_the_last_segmentations_are_kept(live: Live) -> None:
    for voxels in range(RECENT + 5):
        live.runtime.metrics.count_segmentation("bands", voxels, None, {})
    recent = live.client.get("/status").json()["recent"]
    assert [one["voxels"] for one in recent] == list(range(RECENT + 4, 4, -1))


def test_only_admins_see_it(bands_repository: Path) -> None:
    keys = {name: generate_key() for name in ("ada", "bob")}
    access = {"keys": {name: hash_key(key) for name, key in keys.items()}, "admins": ["ada"]}
    with serve(eager(bands_repository, access=access), load=FakeSegmenter) as live:  # type: ignore[arg-type]
        answers = [live.client.get("/status", headers={"X-API-Key": key}) for key in (*keys.values(), "no")]
        answers.append(live.client.get("/status"))
    assert [answer.status_code for answer in answers] == [200, 401, 401, 401]
    assert "ada" not in answers[0].text


def test_without_keys_other_hosts_do_not_see_it(live: Live) -> None:
    answer = live.client.get("/status", headers={"X-Forwarded-For": "192.0.2.7"})
    assert (answer.status_code, answer.json()["type"]) == (401, "urn:stackseg:problem:unauthorized")
