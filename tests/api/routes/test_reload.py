"""Tests of reloading models while a service runs: models are added, replaced, removed or broken."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import FakeSegmenter, wait_until
from live import LiveServer, eager_settings, serve
from model_files import copy_model
from runtimes import list_model_caches

from service.core.errors import BrokenModel
from service.serving.devices.device import count_loaded_bytes


def put_model(models: Path, name: str, version: str) -> Path:
    """Write a copy of the model `bands` with another name and version. Return its model file."""
    if not (models / name).exists():
        copy_model(models / "bands", models / name)
    file = models / name / "model.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"name": name, "version": version}))
    return file


class FakeLoader:
    """Loader of fake segmenters, which it records by identifier.

    broken_versions  versions that fail to load
    held_version    version that loads on a second device only when `gate` is open
    """

    def __init__(self) -> None:
        self.fakes: dict[str, list[FakeSegmenter]] = {}
        self.broken_versions: set[str] = set()
        self.held_version, self.gate = "", threading.Event()

    def __call__(self, spec: Any, settings: Any, *devices: Any) -> FakeSegmenter:
        if spec.version == self.held_version and spec.identifier in self.fakes:
            self.gate.wait(30)
        if spec.version in self.broken_versions:
            raise BrokenModel(f"{spec.folder}: the weights do not fit.")
        self.fakes.setdefault(spec.identifier, []).append(FakeSegmenter(spec, settings, *devices))
        return self.fakes[spec.identifier][-1]


class Service:
    """A service with a writable model folder."""

    def __init__(self, live: LiveServer, models: Path, loader: FakeLoader) -> None:
        self.live, self.models, self.loader = live, models, loader

    def reload(self) -> dict[str, Any]:
        response = self.live.client.post("/models/reload")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def get_served_models(self) -> dict[str, tuple[str, str]]:
        models = self.live.client.get("/models").json()["models"]
        return {model["name"]: (model["version"], model["state"]) for model in models}

    def segment(self, model: str) -> str:
        response = self.live.segment(model=model)
        return str(response.headers.get("X-StackSeg-Model", response.json().get("type") if response.is_error else ""))


@pytest.fixture
def service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    models, loader = tmp_path / "models", FakeLoader()
    shutil.copytree(bands_repository / "bands", models / "bands")
    put_model(models, "other", "1")
    settings = eager_settings(models, models={"default": "bands"}, limits={"cache_bytes": 2**20})
    with serve(settings, load=loader) as live:
        yield Service(live, models, loader)


def test_models_are_added_replaced_and_removed_without_a_restart(service: Service) -> None:
    assert service.reload() == {"added": [], "changed": [], "removed": [], "broken": {}}
    put_model(service.models, "bands", "2")
    put_model(service.models, "third", "1")
    shutil.rmtree(service.models / "other")
    assert service.reload() == {"added": ["third"], "changed": ["bands"], "removed": ["other"], "broken": {}}
    assert service.get_served_models() == {"bands": ("2", "ready"), "third": ("1", "unloaded")}
    assert [service.segment(name) for name in ("bands", "third")] == ["bands/2", "third/1"]
    assert service.segment("other").endswith("unknown-model")
    assert service.live.client.get("/health/ready").status_code == 200


def test_running_request_keeps_its_model_and_its_result_is_not_cached_for_another_model(service: Service) -> None:
    (old,) = service.loader.fakes["bands/1"]
    old.gate.clear()
    responses: list[str] = []
    request = threading.Thread(target=lambda: responses.append(service.segment("bands")))
    request.start()
    wait_until(lambda: service.live.runtime.devices.running_jobs)
    put_model(service.models, "bands", "2")
    assert service.reload()["changed"] == ["bands"]
    assert service.get_served_models()["bands"] == ("2", "ready")
    old.gate.set()
    request.join()
    assert responses == ["bands/1"]
    assert service.segment("bands") == "bands/2"
    memory = service.live.runtime.devices.all[0]
    wait_until(lambda: 'stackseg_model_unloads_total{model="bands"} 1.0' in service.live.client.get("/metrics").text)
    assert count_loaded_bytes(memory) == old.nbytes


def test_result_names_its_model_and_is_not_cached_for_another_model_during_a_reload(
    bands_repository: Path, tmp_path: Path
) -> None:
    models, loader = tmp_path / "models", FakeLoader()
    shutil.copytree(bands_repository / "bands", models / "bands")
    settings = eager_settings(models, device={"serve": ["cpu", "cpu"]}, limits={"cache_bytes": 2**20})
    with serve(settings, load=loader) as live, ThreadPoolExecutor(1) as pool:
        loader.held_version = "2"
        put_model(models, "bands", "2")
        reload = pool.submit(live.client.post, "/models/reload")
        try:
            first, _ = list_model_caches(live.runtime)
            wait_until(lambda: (model := first.get("bands")) and model.segmenter in loader.fakes.get("bands/2", []))
            assert live.client.get("/models").json()["models"][0]["version"] == "1"
            # The first device computes this, because both devices are idle.
            response = live.segment()
            job = live.run()
        finally:
            loader.gate.set()
        assert reload.result().json()["changed"] == ["bands"]
        versions = [response.headers["X-StackSeg-Model"] for response in (response, live.result(job))]
        assert versions == ["bands/2"] * 2
        assert "X-Cache" not in response.headers
        assert [live.segment().headers["X-Cache"] for _ in range(2)] == ["miss", "hit"]


@pytest.mark.parametrize("fault", ["model file", "weights", "loading"])
def test_previous_version_stays_in_use_if_the_new_one_is_broken(service: Service, fault: str) -> None:
    file = put_model(service.models, "bands", "2")
    valid_content = file.read_text()
    weights = (service.models / "bands" / "weights.safetensors").read_bytes()
    if fault == "model file":
        file.write_text("name: [")
    elif fault == "weights":
        (service.models / "bands" / "weights.safetensors").write_bytes(b"other bytes")
    else:
        service.loader.broken_versions.add("2")
    reloaded = service.reload()
    assert (reloaded["changed"], list(reloaded["broken"])) == ([], ["bands"])
    assert service.get_served_models()["bands"] == ("1", "ready")
    assert service.segment("bands") == "bands/1"
    health = service.live.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert any("The previous version of bands is still served" in sentence for sentence in health.json()["degraded"])
    file.write_text(valid_content)
    (service.models / "bands" / "weights.safetensors").write_bytes(weights)
    service.loader.broken_versions.clear()
    assert service.reload() == {"added": [], "changed": ["bands"], "removed": [], "broken": {}}
    assert service.segment("bands") == "bands/2"


def test_broken_model_folder_degrades_the_service_but_leaves_it_ready(service: Service) -> None:
    (service.models / "other" / "model.yaml").write_text("name: [")
    assert list(service.reload()["broken"]) == ["other"]
    ready = service.live.client.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "degraded"})
    assert service.get_served_models()["other"][1] == "failed"
    assert (service.segment("bands"), service.segment("other")[-12:]) == ("bands/1", "broken-model")


def test_weights_that_do_not_match_the_model_file_are_not_loaded(service: Service) -> None:
    (service.models / "other" / "weights.safetensors").write_bytes(b"other bytes")
    assert service.segment("other").endswith("broken-model")
    assert "SHA-256" in service.live.client.get("/models/other").json()["problem"]
