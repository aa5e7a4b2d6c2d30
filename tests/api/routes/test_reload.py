"""Models that are added, replaced and removed while a real service runs, and one that is broken."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import FakeSegmenter, until
from live import Live, eager, serve
from model_files import copy_model
from runtimes import caches

from service.core.errors import BrokenModel
from service.serving.devices.device import loaded_bytes


def put(models: Path, name: str, version: str) -> Path:
    """Make `name` a copy of the only model in the folder of `bands`, with another name and version."""
    if not (models / name).exists():
        copy_model(models / "bands", models / name)
    file = models / name / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"name": name, "version": version}))
    return file


class Loading:
    """Loads fake segmenters, and remembers them by identifier; versions in `broken` do not load.

    The version `held` loads on one device, and on a second once `gate` is open.
    """

    def __init__(self) -> None:
        self.fakes: dict[str, list[FakeSegmenter]] = {}
        self.broken: set[str] = set()
        self.held, self.gate = "", threading.Event()

    def __call__(self, spec: Any, settings: Any, *devices: Any) -> FakeSegmenter:
        if spec.version == self.held and spec.identifier in self.fakes:
            self.gate.wait(30)
        if spec.version in self.broken:
            raise BrokenModel(f"{spec.folder}: the weights do not fit.")
        self.fakes.setdefault(spec.identifier, []).append(FakeSegmenter(spec, settings, *devices))
        return self.fakes[spec.identifier][-1]


class Service:
    """A service whose folder of models may be changed."""

    def __init__(self, live: Live, models: Path, loading: Loading) -> None:
        self.live, self.models, self.loading = live, models, loading

    def reload(self) -> dict[str, Any]:
        response = self.live.client.post("/models/reload")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def served(self) -> dict[str, tuple[str, str]]:
        models = self.live.client.get("/models").json()["models"]
        return {model["name"]: (model["version"], model["state"]) for model in models}

    def segment(self, model: str) -> str:
        response = self.live.segment(model=model)
        return str(response.headers.get("X-StackSeg-Model", response.json().get("type") if response.is_error else ""))


@pytest.fixture
def service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    models, loading = tmp_path / "models", Loading()
    shutil.copytree(bands_repository / "bands", models / "bands")
    put(models, "other", "1")
    settings = eager(models, models={"default": "bands"}, limits={"cache_bytes": 2**20})
    with serve(settings, load=loading) as live:
        yield Service(live, models, loading)


def test_models_are_added_replaced_and_removed_without_a_restart(service: Service) -> None:
    assert service.reload() == {"added": [], "changed": [], "removed": [], "broken": {}}
    put(service.models, "bands", "2")
    put(service.models, "third", "1")
    shutil.rmtree(service.models / "other")
    assert service.reload() == {"added": ["third"], "changed": ["bands"], "removed": ["other"], "broken": {}}
    assert service.served() == {"bands": ("2", "ready"), "third": ("1", "unloaded")}
    assert [service.segment(name) for name in ("bands", "third")] == ["bands/2", "third/1"]
    assert service.segment("other").endswith("unknown-model")
    assert service.live.client.get("/health/ready").status_code == 200


def test_a_request_keeps_its_model_and_its_result_is_kept_for_no_other(service: Service) -> None:
    (old,) = service.loading.fakes["bands/1"]
    old.gate.clear()
    answers: list[str] = []
    request = threading.Thread(target=lambda: answers.append(service.segment("bands")))
    request.start()
    until(lambda: service.live.runtime.devices.running)
    put(service.models, "bands", "2")
    assert service.reload()["changed"] == ["bands"]
    assert service.served()["bands"] == ("2", "ready")
    old.gate.set()
    request.join()
    assert answers == ["bands/1"]
    assert service.segment("bands") == "bands/2"
    memory = service.live.runtime.devices.all[0]
    until(lambda: 'stackseg_model_unloads_total{model="bands"} 1.0' in service.live.client.get("/metrics").text)
    assert loaded_bytes(memory) == old.nbytes


def test_a_result_says_which_model_made_it_and_is_kept_for_no_other_while_devices_change(
    bands_repository: Path, tmp_path: Path
) -> None:
    models, loading = tmp_path / "models", Loading()
    shutil.copytree(bands_repository / "bands", models / "bands")
    settings = eager(models, device={"serve": ["cpu", "cpu"]}, limits={"cache_bytes": 2**20})
    with serve(settings, load=loading) as live, ThreadPoolExecutor(1) as pool:
        loading.held = "2"
        put(models, "bands", "2")
        reloading = pool.submit(live.client.post, "/models/reload")
        try:
            first, _ = caches(live.runtime)
            until(lambda: (model := first.get("bands")) and model.segmenter in loading.fakes.get("bands/2", []))
            assert live.client.get("/models").json()["models"][0]["version"] == "1"
            # By the first device, as both have nothing to do.
            answer = live.segment()
            job = live.run()
        finally:
            loading.gate.set()
        assert reloading.result().json()["changed"] == ["bands"]
        told = [each.headers["X-StackSeg-Model"] for each in (answer, live.result(job))]
        assert told == ["bands/2"] * 2
        assert "X-Cache" not in answer.headers
        assert [live.segment().headers["X-Cache"] for _ in range(2)] == ["miss", "hit"]


@pytest.mark.parametrize("fault", ["model file", "weights", "loading"])
def test_a_model_that_is_broken_meanwhile_is_served_as_it_was(service: Service, fault: str) -> None:
    file = put(service.models, "bands", "2")
    good = file.read_text()
    weights = (service.models / "bands" / "weights.safetensors").read_bytes()
    if fault == "model file":
        file.write_text("name: [")
    elif fault == "weights":
        (service.models / "bands" / "weights.safetensors").write_bytes(b"other bytes")
    else:
        service.loading.broken.add("2")
    reloaded = service.reload()
    assert (reloaded["changed"], list(reloaded["broken"])) == ([], ["bands"])
    assert service.served()["bands"] == ("1", "ready")
    assert service.segment("bands") == "bands/1"
    health = service.live.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert any("bands is served as it was" in sentence for sentence in health.json()["degraded"])
    file.write_text(good)
    (service.models / "bands" / "weights.safetensors").write_bytes(weights)
    service.loading.broken.clear()
    assert service.reload() == {"added": [], "changed": ["bands"], "removed": [], "broken": {}}
    assert service.segment("bands") == "bands/2"


def test_a_broken_folder_degrades_the_service_and_leaves_it_ready(service: Service) -> None:
    (service.models / "other" / "model.yaml").write_text("name: [")
    assert list(service.reload()["broken"]) == ["other"]
    ready = service.live.client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "degraded"})
    assert service.served()["other"][1] == "failed"
    assert (service.segment("bands"), service.segment("other")[-12:]) == ("bands/1", "broken-model")


def test_weights_that_were_replaced_are_not_taken_for_those_of_the_model_file(service: Service) -> None:
    (service.models / "other" / "weights.safetensors").write_bytes(b"other bytes")
    assert service.segment("other").endswith("broken-model")
    assert "SHA-256" in service.live.client.get("/models/other").json()["problem"]
