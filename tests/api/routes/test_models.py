"""Tests of deleting trained models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter, wait_until
from live import STACK, TIFF, eager_settings, parse_problem, serve
from model_files import copy_model
from runtimes import get_loaded_segmenter

from service.api.access.keys import hash_key
from service.serving.learning.trained_models import OWNER_FILE


def test_trained_model_is_deleted_by_its_owner_or_an_admin_if_no_job_needs_it(
    bands_repository: Path, tmp_path: Path
) -> None:
    trained = tmp_path / "jobs" / "trained-models"
    for name in ("mine", "other", "kept"):
        (copy_model(bands_repository / "bands", trained / name) / OWNER_FILE).write_text(json.dumps("ann"))
    access = {"keys": {name: hash_key(name) for name in ("ann", "bob", "eve")}, "admins": ["eve"]}
    models = {"load": ["kept"], "default": "bands"}
    settings = eager_settings(bands_repository, access=access, jobs={"folder": tmp_path / "jobs"}, models=models)
    with serve(settings, load=FakeSegmenter) as live:  # type: ignore[arg-type]

        def request(method: str, path: str, caller: str, **options: Any) -> Any:
            return live.client.request(method, path, headers=TIFF | {"X-API-Key": caller}, **options)

        def delete(name: str, caller: str = "ann") -> int | tuple[int, str]:
            response = request("DELETE", f"/models/{name}", caller)
            return response.status_code if response.is_success else parse_problem(response)

        removable = {}
        for caller in ("ann", "bob", "eve"):
            listed = request("GET", "/models", caller).json()["models"]
            removable[caller] = [model["name"] for model in listed if model["removable"]]
        assert removable == {"ann": ["kept", "mine", "other"], "bob": [], "eve": ["kept", "mine", "other"]}
        assert [delete(name) for name in ("bands", "kept", "nowhere")] == [
            (409, "model-kept"),
            (409, "model-kept"),
            (404, "unknown-model"),
        ]
        assert delete("mine", "bob") == (401, "unauthorized")
        assert request("POST", "/segment?model=mine", "bob", content=STACK).status_code == 200
        fake: Any = get_loaded_segmenter(live.runtime.models, "mine")
        fake.gate.clear()
        job = request("POST", "/jobs?model=mine", "bob", content=STACK).json()["id"]
        assert delete("mine") == (409, "model-kept")
        fake.gate.set()
        wait_until(lambda: delete("mine") == 204)
        assert [delete("other", "eve"), delete("mine")] == [204, (404, "unknown-model")]
        assert [path.name for path in trained.iterdir()] == ["kept"]
        assert [model["name"] for model in request("GET", "/models", "bob").json()["models"]] == ["bands", "kept"]
        assert request("GET", f"/jobs/{job}/result", "bob").status_code == 200
        assert request("POST", "/segment?model=mine", "bob", content=STACK).status_code == 404
