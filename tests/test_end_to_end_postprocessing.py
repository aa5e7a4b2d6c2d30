"""End-to-end tests of post-processing options in requests, jobs and the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from live import LabelTiff, LiveServer, as_tiff, eager_settings, serve

from service.__main__ import main
from service.models.spec import ModelSpec

STACK = as_tiff(np.random.default_rng(0).integers(0, 255, (12, 40, 40), dtype=np.uint16))
OPTIONS: dict[str, Any] = {
    "threshold": "0.51",
    "minimum_size": "0.4um3",
    "border": "drop",
    "fill_holes": "true",
    "min_confidence": "0.552",
}


@pytest.fixture(scope="module")
def live(random_nuclei: ModelSpec) -> Iterator[LiveServer]:
    with serve(eager_settings(random_nuclei.folder.parent, limits={"cache_bytes": 2**20})) as running:
        yield running


@pytest.fixture
def config(random_nuclei: ModelSpec, write_config: Any) -> Path:
    return write_config(random_nuclei.folder.parent)


def test_each_option_changes_the_labels_and_the_cache_key(live: LiveServer) -> None:
    plain = live.segment(STACK)
    # With the random network, a threshold of 0.51 does not change the labels, but 0.45 does.
    for name, value in (OPTIONS | {"threshold": "0.45"}).items():
        answer = live.segment(STACK, **{name: value})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-cache"] == "miss"
        assert answer.headers["etag"] != plain.headers["etag"]
        assert name == "fill_holes" or not np.array_equal(
            LabelTiff(answer.content).pixels, LabelTiff(plain.content).pixels
        )
    assert live.segment(STACK, **OPTIONS).headers["x-cache"] == "miss"
    assert live.segment(STACK, **OPTIONS).headers["x-cache"] == "hit"


def test_jobs_and_the_command_line_give_the_same_labels_and_record_the_options(
    live: LiveServer, config: Path, tmp_path: Path
) -> None:
    answer = live.segment(STACK, **OPTIONS)
    job = live.run(STACK, **OPTIONS)
    assert job["parameters"].keys() == OPTIONS.keys()
    job_result = live.result(job)
    assert np.array_equal(LabelTiff(job_result.content).pixels, LabelTiff(answer.content).pixels)
    stack, labels = tmp_path / "stack.tif", tmp_path / "labels.tif"
    stack.write_bytes(STACK)
    options = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", value)]
    assert main(["segment", str(stack), str(labels), *options, "--config", str(config)]) == 0
    assert np.array_equal(tifffile.imread(labels), LabelTiff(answer.content).pixels)
    assert tifffile.imread(labels).any()
    folder, out = tmp_path / "stacks", tmp_path / "out"
    folder.mkdir()
    (folder / "stack.tif").write_bytes(STACK)
    assert main(["segment", str(folder), str(out), *options, "--config", str(config)]) == 0
    folder_labels = out / "stack_labels.ome.tif"
    assert np.array_equal(tifffile.imread(folder_labels), tifffile.imread(labels))
    for content in (answer.content, job_result.content, labels.read_bytes(), folder_labels.read_bytes()):
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            entries = ElementTree.fromstring(str(file.ome_metadata)).iter()
        (parameters,) = (entry.text for entry in entries if entry.get("K") == "parameters")
        expected = {"threshold": 0.51, "minimum_size": "0.4um3", "border": "drop", "fill_holes": True}
        assert json.loads(str(parameters)) == expected | {"min_confidence": 0.552}


def test_model_with_two_channels_accepts_two_channel_stacks(
    write_model: Any, random_nuclei_content: dict[str, Any]
) -> None:
    architecture, model_input = (random_nuclei_content[key] for key in ("architecture", "input"))
    arguments = architecture["arguments"] | {"in_channels": 2}
    two = {"architecture": architecture | {"arguments": arguments}, "input": model_input | {"channels": 2}}
    spec = write_model(random_nuclei_content | two)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 2, 20, 20), dtype=np.uint8)
    both, three = (as_tiff(stack, metadata={"axes": "ZCYX"}) for stack in (pixels, pixels[:, [0, 1, 1]]))
    with serve(eager_settings(spec.folder.parent)) as live:
        answers = [live.segment(both, **channel) for channel in ({}, {"channel": "all"}, {"channel": "1"})]
        assert [answer.status_code for answer in answers] == [200, 200, 422]
        assert np.array_equal(*(LabelTiff(answer.content).pixels for answer in answers[:2]))
        measured = live.segment(both, channel="all", measurements="csv")
        assert {"intensity_mean-0", "intensity_mean-1"} <= set(measured.text.splitlines()[0].split(","))
        refused = live.segment(three, channel="all")
        assert (refused.status_code, "needs 2 channels, but the volume has 3" in refused.text) == (422, True)


def test_invalid_options_are_refused_with_the_name_that_the_client_used(
    live: LiveServer, config: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    refused = live.segment(STACK, output="classes", minimum_size="9")
    assert (refused.status_code, refused.json()["detail"][:13]) == (422, "minimum_size:")
    bare = as_tiff(np.zeros((4, 20, 20), np.uint8), metadata={"axes": "ZYX"}, resolution=None)
    refused = live.segment(bare, minimum_size="9um3")
    assert (refused.status_code, "voxel_size=" in refused.json()["detail"]) == (422, True)
    assert "voxel_size=" in live.post("/inspect", bare, minimum_size="9um3").json()["problem"]
    stack = tmp_path / "stack.tif"
    stack.write_bytes(STACK)
    options = ["--config", config, "--output", "probabilities", "--threshold", "0.4"]
    message = run_stackseg("segment", stack, tmp_path / "out.tif", *options, status=1)
    assert "--threshold: this option has no effect on --output probabilities" in message
