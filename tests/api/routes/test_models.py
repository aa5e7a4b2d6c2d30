"""Tests of listing models with their pictures, and of deleting trained models."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from fakes import FakeSegmenter, wait_until
from live import STACK, TIFF, eager_settings, parse_problem, serve
from model_files import copy_model
from PIL import Image
from runtimes import get_loaded_segmenter

from service.api.access.keys import hash_key
from service.models.repository import PICTURE_FILE
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


def test_pictures_are_files_or_drawn_from_samples(bands_repository: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    names = ("bare", "drawn", "stored")
    for name in names:
        changes = {} if name == "bare" else {"sample": {}, "authors": ["A. Tester"]}
        folder = copy_model(bands_repository / "bands", models / name, **changes)
        pixels = np.zeros((5, 40, 60), np.uint8)
        pixels[2, 10:30, 20:40] = 200
        tifffile.imwrite(folder / "sample.tif", pixels, metadata={"axes": "ZYX"})
        tifffile.imwrite(folder / "expected.tif", (pixels > 0).astype(np.uint16), metadata={"axes": "ZYX"})
    (models / "stored" / PICTURE_FILE).write_bytes(b"a picture")
    with serve(eager_settings(models), load=FakeSegmenter) as live:  # type: ignore[arg-type]
        listed = {model["name"]: model for model in live.client.get("/models").json()["models"]}
        assert [bool(listed[name]["picture"]) for name in names] == [False, True, True]
        assert [listed[name]["authors"] for name in names] == [[], ["A. Tester"], ["A. Tester"]]
        responses = [live.client.get(f"/models/{name}/picture") for name in names]
    assert [response.status_code for response in responses] == [404, 200, 200]
    assert responses[2].content == b"a picture"
    picture = np.asarray(Image.open(io.BytesIO(responses[1].content)))
    # Planes are enlarged eight times. The object is white, and its outline has a color.
    assert (picture.shape, picture[0, 0].tolist(), picture[160, 240].tolist()) == ((320, 480, 3), [0] * 3, [255] * 3)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 3
