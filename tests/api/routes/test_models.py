"""Trained models are deleted by the key that has trained them, and never under a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes import FakeSegmenter, until
from live import STACK, TIFF, eager, problem, serve
from model_files import copy_model
from runtimes import loaded_segmenter

from service.api.access.keys import hash_key
from service.serving.learning.trained_models import OWNER


def test_a_trained_model_is_deleted_by_its_key_once_no_job_needs_it(bands_repository: Path, tmp_path: Path) -> None:
    trained = tmp_path / "jobs" / "trained-models"
    for name in ("mine", "other", "kept"):
        (copy_model(bands_repository / "bands", trained / name) / OWNER).write_text(json.dumps("ann"))
    access = {"keys": {name: hash_key(name) for name in ("ann", "bob", "eve")}, "admins": ["eve"]}
    loaded = {"load": ["kept"], "default": "bands"}
    chosen = eager(bands_repository, access=access, jobs={"folder": tmp_path / "jobs"}, models=loaded)
    with serve(chosen, load=FakeSegmenter) as live:  # type: ignore[arg-type]

        def ask(method: str, path: str, caller: str, **sent: Any) -> Any:
            return live.client.request(method, path, headers=TIFF | {"X-API-Key": caller}, **sent)

        def delete(name: str, caller: str = "ann") -> int | tuple[int, str]:
            answer = ask("DELETE", f"/models/{name}", caller)
            return answer.status_code if answer.is_success else problem(answer)

        removable = {}
        for caller in ("ann", "bob", "eve"):
            models = ask("GET", "/models", caller).json()["models"]
            removable[caller] = [model["name"] for model in models if model["removable"]]
        assert removable == {"ann": ["kept", "mine", "other"], "bob": [], "eve": ["kept", "mine", "other"]}
        assert [delete(name) for name in ("bands", "kept", "nowhere")] == [
            (409, "model-kept"),
            (409, "model-kept"),
            (404, "unknown-model"),
        ]
        assert delete("mine", "bob") == (401, "unauthorized")
        assert ask("POST", "/segment?model=mine", "bob", content=STACK).status_code == 200
        fake: Any = loaded_segmenter(live.runtime.models, "mine")
        fake.gate.clear()
        job = ask("POST", "/jobs?model=mine", "bob", content=STACK).json()["id"]
        assert delete("mine") == (409, "model-kept")
        fake.gate.set()
        until(lambda: delete("mine") == 204)
        assert [delete("other", "eve"), delete("mine")] == [204, (404, "unknown-model")]
        assert [path.name for path in trained.iterdir()] == ["kept"]
        assert [model["name"] for model in ask("GET", "/models", "bob").json()["models"]] == ["bands", "kept"]
        assert ask("GET", f"/jobs/{job}/result", "bob").status_code == 200
        assert ask("POST", "/segment?model=mine", "bob", content=STACK).status_code == 404
