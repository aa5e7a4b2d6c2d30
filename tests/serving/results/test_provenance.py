"""What a result says of its making, from a real server and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from blake3 import blake3
from fakes import until
from live import as_tiff, eager, serve

from service.__main__ import main
from service.core.quantities import Diameter
from service.core.types import Segmentation
from service.inference.types import Doubt, Result
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.results.provenance import describe_origin, hash_file

STACK = as_tiff(np.random.default_rng(0).integers(0, 255, (8, 40, 40), dtype=np.uint16))


def origin_of(content: bytes, folder: Path) -> dict[str, str]:
    path = folder / "answer.tif"
    path.write_bytes(content)
    with tifffile.TiffFile(path) as file:
        root = ElementTree.fromstring(str(file.ome_metadata))
    return {str(entry.get("K")): str(entry.text) for entry in root.iter() if entry.tag.endswith("}M")}


def test_what_is_not_known_is_left_out(bands: ModelSpec) -> None:
    result = Result(Segmentation(np.zeros((1, 2, 2), np.uint8), "labels"), {}, ())
    assert set(describe_origin(Query(), result, "", None)) == {"software"}
    known = result._replace(diameter=Diameter((15,), "px"), estimated=True, notes=("One.", "Two."), spec=bands)
    known = known._replace(doubt=Doubt(0.5, "Look twice.", "diameter=15px"))
    found = describe_origin(Query(overlap=0.5, model="nuclei"), known, "a.tif", "00")
    assert (found["diameter"], found["source"]) == ("15px; estimated", "a.tif")
    assert (found["doubt"], found["notes"]) == ("Look twice.", "One. Two.")
    assert found["model"] == "bands/1"
    assert json.loads(found["parameters"]) == {"overlap": 0.5}


@pytest.mark.parametrize("path", ["segment", "jobs"])
def test_an_answer_says_how_it_was_made(bands_repository: Path, tmp_path: Path, path: str) -> None:
    with serve(eager(bands_repository)) as live:
        headers = {"Content-Type": "image/tiff", "X-Filename": "embryo 7.tif"}
        answer = live.client.post(f"/{path}", content=STACK, params={"overlap": 0.5}, headers=headers)
        if path == "jobs":
            job = answer.headers["location"]
            until(lambda: live.client.get(job).json()["state"] == "done", 60)
            answer = live.client.get(f"{job}/result")
    found = origin_of(answer.content, tmp_path)
    assert found["model"] == answer.headers["x-stackseg-model"]
    assert found["engine"].startswith("eager ")
    assert json.loads(found["parameters"]) == {"overlap": 0.5}
    assert found.get("source") == ("embryo 7.tif" if path == "jobs" else None)
    assert found["source_blake3"] == blake3(STACK).hexdigest()


def test_the_command_line_says_the_same(bands_repository: Path, tmp_path: Path) -> None:
    stack, labels, config = (tmp_path / name for name in ("stack.tif", "labels.tif", "config.yaml"))
    stack.write_bytes(STACK)
    config.write_text(f"models: {{folder: {bands_repository}}}\nengine: {{kind: eager}}\ndevice: {{name: cpu}}\n")
    assert main(["segment", str(stack), str(labels), "--config", str(config)]) == 0
    found = origin_of(labels.read_bytes(), tmp_path)
    assert (found["model"], found["source"], found["source_blake3"]) == ("bands/1", "stack.tif", hash_file(stack))
