"""End-to-end tests of warnings about low confidence, with a server and with the command line."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from live import LiveServer, as_tiff, make_live_fixture, parse_problem
from paths import ROOT

from service.__main__ import main

live = make_live_fixture(ROOT / "models", device={"threads": 2})


@pytest.fixture(scope="module")
def membranes() -> bytes:
    """A stack of stained membranes. The default model is not trained for them."""
    return as_tiff(tifffile.imread(ROOT / "models" / "membranes" / "sample.tif")[8:48, 24:88, 24:88])


def test_default_model_suggests_the_membrane_model_for_membranes(live: LiveServer, membranes: bytes) -> None:
    response = live.segment(membranes, measurements="zip")
    assert response.status_code == 200, response.text
    warning = json.loads(response.headers["x-stackseg-warning"])
    assert warning["type"] == "urn:stackseg:warning:doubtful-result"
    assert warning["try"] == "model=membranes"
    assert warning["try"] in warning["detail"]
    assert warning["confidence"] < 0.6
    assert float(response.headers["x-stackseg-confidence"]) == pytest.approx(warning["confidence"], abs=0.006)
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert json.loads(archive.read("warning.json")) == warning
        header, *rows = archive.read("measurements.csv").decode().splitlines()
        with tifffile.TiffFile(io.BytesIO(archive.read("labels.ome.tif"))) as file:
            assert file.ome_metadata is not None
            assert warning["detail"] in file.ome_metadata
    table = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert all(0.5 < float(row["mean_probability"]) <= 1 for row in table)
    # The confidence of the result is the mean confidence of the objects.
    assert np.mean([float(row["confidence"]) for row in table]) == pytest.approx(warning["confidence"], abs=0.001)


def test_jobs_have_the_same_warning_and_strict_requests_fail_with_it(live: LiveServer, membranes: bytes) -> None:
    done, failed = live.run(membranes), live.wait(live.submit(membranes, strict=True), "failed")
    assert done["doubt"]["try"] == "model=membranes"
    assert done["doubt"]["detail"] == done["warnings"][0]
    assert json.loads(live.result(done).headers["x-stackseg-warning"]) == done["doubt"]
    assert failed["problem"]["type"] == "urn:stackseg:problem:doubtful-result"
    refused = live.segment(membranes, strict=True)
    assert parse_problem(refused) == (422, "doubtful-result")
    assert refused.json()["detail"] == failed["problem"]["detail"] == done["doubt"]["detail"]


@pytest.mark.parametrize("model", ["nuclei", "membranes"])
def test_stack_without_objects_has_a_warning(live: LiveServer, model: str) -> None:
    blank = as_tiff(np.full((16, 48, 48), 7, np.uint16))
    response = live.segment(blank, model=model)
    assert response.headers["x-stackseg-objects"] == "0"
    assert "x-stackseg-confidence" not in response.headers
    warning = json.loads(response.headers["x-stackseg-warning"])
    assert warning["detail"].startswith("No object was found: ")
    assert (warning["confidence"], warning["try"]) == (None, "")
    assert live.segment(blank, model=model, strict=True).json()["detail"] == warning["detail"]


def test_membrane_model_warns_of_nuclei(live: LiveServer) -> None:
    stack = as_tiff(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[:, :64, :64])
    warning = json.loads(live.segment(stack, model="membranes").headers["x-stackseg-warning"])
    assert warning["confidence"] < 0.6
    assert warning["try"] == ""


def test_good_results_have_no_warning_and_pass_strict(live: LiveServer) -> None:
    stack = as_tiff(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[:, :96, :96])
    response = live.segment(stack, strict=True, diameter="12,29,29px")
    assert response.status_code == 200, response.text
    assert "x-stackseg-warning" not in response.headers
    assert float(response.headers["x-stackseg-confidence"]) > 0.5


def test_command_line_warns_on_stderr_and_fails_with_strict(
    membranes: bytes, write_config: Any, tmp_path: Path, run_stackseg: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(ROOT / "models")
    folder = tmp_path / "stacks"
    folder.mkdir()
    stack, labels = folder / "a.tif", tmp_path / "labels.tif"
    stack.write_bytes(membranes)
    assert "Try --model membranes" in run_stackseg("segment", stack, labels, "--strict", "--config", config, status=1)
    assert not labels.exists()
    assert main(["segment", str(folder), str(tmp_path / "out"), "--config", str(config)]) == 0
    assert "a.tif: warning: The labels may be wrong" in capsys.readouterr().err
    assert "Try --model membranes" in (tmp_path / "out" / "report.html").read_text()
