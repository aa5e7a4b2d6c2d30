"""The provenance in result files of a real server and of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from blake3 import blake3
from fakes import wait_until
from live import as_tiff, eager_settings, serve

from service.__main__ import main
from service.core.quantities import Diameter
from service.core.types import Segmentation
from service.inference.types import QualityWarning, Result
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.results.provenance import describe_provenance, hash_file

STACK = as_tiff(np.random.default_rng(0).integers(0, 255, (8, 40, 40), dtype=np.uint16))


def read_provenance(content: bytes, folder: Path) -> dict[str, str]:
    path = folder / "answer.tif"
    path.write_bytes(content)
    with tifffile.TiffFile(path) as file:
        root = ElementTree.fromstring(str(file.ome_metadata))
    return {str(entry.get("K")): str(entry.text) for entry in root.iter() if entry.tag.endswith("}M")}


def test_unknown_values_are_omitted(bands: ModelSpec) -> None:
    result = Result(Segmentation(np.zeros((1, 2, 2), np.uint8), "labels"), {}, ())
    assert set(describe_provenance(Query(), result, "", None)) == {"software"}
    result = result._replace(
        diameter=Diameter((15,), "px"), is_diameter_estimated=True, notes=("One.", "Two."), spec=bands
    )
    result = result._replace(quality_warning=QualityWarning(0.5, "Confidence is low.", "diameter=15px"))
    provenance = describe_provenance(Query(overlap=0.5, model="nuclei"), result, "a.tif", "00")
    assert (provenance["diameter"], provenance["source"]) == ("15px; estimated", "a.tif")
    assert (provenance["doubt"], provenance["notes"]) == ("Confidence is low.", "One. Two.")
    assert provenance["model"] == "bands/1"
    assert json.loads(provenance["parameters"]) == {"overlap": 0.5}


@pytest.mark.parametrize("path", ["segment", "jobs"])
def test_results_of_the_server_contain_their_provenance(bands_repository: Path, tmp_path: Path, path: str) -> None:
    with serve(eager_settings(bands_repository)) as live:
        headers = {"Content-Type": "image/tiff", "X-Filename": "embryo 7.tif"}
        answer = live.client.post(f"/{path}", content=STACK, params={"overlap": 0.5}, headers=headers)
        if path == "jobs":
            job = answer.headers["location"]
            wait_until(lambda: live.client.get(job).json()["state"] == "done", 60)
            answer = live.client.get(f"{job}/result")
    provenance = read_provenance(answer.content, tmp_path)
    assert provenance["model"] == answer.headers["x-stackseg-model"]
    assert provenance["engine"].startswith("eager ")
    assert json.loads(provenance["parameters"]) == {"overlap": 0.5}
    assert provenance.get("source") == ("embryo 7.tif" if path == "jobs" else None)
    assert provenance["source_blake3"] == blake3(STACK).hexdigest()


def test_results_of_the_command_line_contain_their_provenance(bands_repository: Path, tmp_path: Path) -> None:
    stack, labels, config = (tmp_path / name for name in ("stack.tif", "labels.tif", "config.yaml"))
    stack.write_bytes(STACK)
    config.write_text(f"models: {{folder: {bands_repository}}}\nengine: {{kind: eager}}\ndevice: {{name: cpu}}\n")
    assert main(["segment", str(stack), str(labels), "--config", str(config)]) == 0
    provenance = read_provenance(labels.read_bytes(), tmp_path)
    assert (provenance["model"], provenance["source"], provenance["source_blake3"]) == (
        "bands/1",
        "stack.tif",
        hash_file(stack),
    )
