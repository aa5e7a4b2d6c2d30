"""End-to-end tests of time series, with a server and with the command line."""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import wait_until
from live import LabelTiff, LiveServer, as_tiff, eager_settings, serve
from model_files import copy_model
from numpy.typing import NDArray
from paths import ROOT

from scripts.recipes.synthetic_nuclei import synthesize
from service.__main__ import main
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader

NUM_TIME_POINTS = 5
# The diameter of the model in pixels: nothing is resampled, and no diameter is estimated.
DIAMETER = "20,20,20px"


def as_series(pixels: NDArray[Any], **options: Any) -> bytes:
    """Return the bytes of an ImageJ hyperstack [T, Z, Y, X] with a time point every 5 minutes."""
    metadata = {"axes": "TZYX", "spacing": 0.5, "unit": "um", "finterval": 5.0, "tunit": "min"}
    return as_tiff(pixels, metadata=metadata, **options)


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint8]:
    """Nuclei that move through the image during five time points, [T, Z, Y, X]."""
    image, _labels = synthesize(np.random.default_rng(0), (12, 56, 56))
    return np.stack([image[:, 2 * time : 2 * time + 48, time : time + 48] for time in range(NUM_TIME_POINTS)])


@pytest.fixture(scope="module")
def damaged(pixels: NDArray[np.uint8]) -> bytes:
    """A series in which the compressed pixels of time point 3 are overwritten."""
    content = as_series(pixels, compression="zlib")
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page = file.pages[3 * pixels.shape[1]]
        start, count = page.dataoffsets[0], page.databytecounts[0]
    return content[:start] + b"\xff" * count + content[start + count :]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model nuclei without confidence: its calibration would estimate the diameter of every time point."""
    root = tmp_path_factory.mktemp("models")
    copy_model(ROOT / "models" / "nuclei", root / "nuclei", confidence=None)
    return root


@pytest.fixture(scope="module")
def live(repository: Path) -> Iterator[LiveServer]:
    with serve(eager_settings(repository)) as running:
        yield running


@pytest.fixture(scope="module")
def individual_labels(live: LiveServer, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The labels of each time point, segmented in a request of its own."""
    stack = as_series(pixels)
    return [
        LabelTiff(live.segment(stack, time=time, diameter=DIAMETER).content).pixels for time in range(NUM_TIME_POINTS)
    ]


@pytest.mark.parametrize(("text", "times"), [("all", range(5)), ("1:3", range(1, 3)), ("3:", range(3, 5))])
def test_series_has_the_labels_of_its_individual_time_points(
    live: LiveServer,
    pixels: NDArray[np.uint8],
    individual_labels: list[NDArray[Any]],
    text: str,
    times: range,
    tmp_path: Path,
) -> None:
    response = live.segment(as_series(pixels), time=text, diameter=DIAMETER)

    assert response.status_code == 200, response.text
    labels = tifffile.imread(io.BytesIO(response.content))
    np.testing.assert_array_equal(labels, np.stack([individual_labels[time] for time in times]))
    assert int(response.headers["x-stackseg-objects"]) == sum(int(individual_labels[time].max()) for time in times) > 0
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(response.content)
    found = stack_reader.inspect(path, Selection(), 2**20)
    assert (found.axes, found.stored_shape) == ("TZYX", (len(times), *pixels.shape[1:]))
    assert (found.voxel_size, found.time_interval) == (VoxelSize(0.5, 0.2, 0.2), TimeInterval(5, "min"))
    with tifffile.TiffFile(path) as file:
        description = tifffile.tifffile.imagej_description_metadata(file.pages.first.tags.getall(270)[1].value)
    assert (description["frames"], description["slices"], description["finterval"], description["tunit"]) == (
        len(times),
        12,
        5,
        "min",
    )
    assert live.leftovers() == []


def test_linked_objects_keep_their_labels_over_time(
    live: LiveServer, pixels: NDArray[np.uint8], individual_labels: list[NDArray[Any]]
) -> None:
    response = live.segment(as_series(pixels), time="all", diameter=DIAMETER, link="overlap", measurements="zip")

    assert response.status_code == 200, response.text
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
        rows = list(csv.DictReader(io.StringIO(archive.read("measurements.csv").decode())))
    for linked, unlinked in zip(labels, individual_labels, strict=True):
        # The objects are the same, but have other labels.
        pairs = np.unique(np.stack((linked.ravel(), unlinked.ravel())), axis=1)
        assert pairs.shape[1] == len(np.unique(unlinked)) == len(np.unique(linked))
    assert (
        int(response.headers["x-stackseg-objects"])
        == labels.max()
        < sum(unlinked.max() for unlinked in individual_labels) / 2
    )
    assert len({tuple(row[name] for name in ("time", "track_id")) for row in rows}) == len(rows)
    for time, volume in enumerate(labels):
        time_rows = [row for row in rows if row["time"] == str(time)]
        assert [int(row["track_id"]) for row in time_rows] == np.unique(volume[volume > 0]).tolist()
        assert all(row["label"] == row["track_id"] for row in time_rows)
        assert [int(row["num_pixels"]) for row in time_rows] == np.bincount(volume[volume > 0])[1:][
            np.unique(volume[volume > 0]) - 1
        ].tolist()
        assert {int(row["parent"]) for row in time_rows} <= {0, *map(int, np.unique(labels[:time]))}


def test_job_keeps_the_time_points_before_a_damaged_one(
    live: LiveServer, damaged: bytes, individual_labels: list[NDArray[Any]]
) -> None:
    job = live.submit(damaged, time="all", diameter=DIAMETER)
    report = live.wait(job, "done", "failed")
    assert (report["state"], report["time_points"]) == ("failed", {"done": 3, "total": 5})
    assert "Time point 3" in report["problem"]["detail"]
    assert report["problem"]["type"].endswith("bad-file")
    assert any("Time point 3" in warning for warning in report["warnings"])
    result = live.result(job)
    assert result.status_code == 200
    assert "Time point 3" in result.headers["x-stackseg-note"]
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(result.content)), np.stack(individual_labels[:3]))


def test_error_suggests_the_time_points_before_the_damaged_one(live: LiveServer, damaged: bytes) -> None:
    response = live.segment(damaged, time="1:", diameter=DIAMETER)
    assert response.status_code == 422
    assert "Time point 3" in response.json()["detail"]
    assert "time=1:3" in response.json()["detail"]
    # If the first requested time point is damaged, there are none before it.
    assert "time=3:3" not in live.segment(damaged, time="3:", diameter=DIAMETER).json()["detail"]
    assert live.leftovers() == []


def test_command_line_keeps_the_time_points_before_a_damaged_one(
    damaged: bytes,
    individual_labels: list[NDArray[Any]],
    write_config: Any,
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stack, out, table = tmp_path / "series.tif", tmp_path / "out.tif", tmp_path / "out.csv"
    stack.write_bytes(damaged)
    command = ["segment", str(stack), str(out), "--time", "all", "--diameter", DIAMETER, "--measurements", str(table)]

    assert main([*command, "--config", str(write_config(repository))]) == 1

    printed = capsys.readouterr()
    assert "3 of 5 time points" in printed.out
    assert "Time point 3" in printed.err
    np.testing.assert_array_equal(tifffile.imread(out), np.stack(individual_labels[:3]))
    with table.open(newline="") as file:
        assert {row["time"] for row in csv.DictReader(file)} == {"0", "1", "2"}


def test_series_can_be_cancelled_between_time_points(live: LiveServer, pixels: NDArray[np.uint8]) -> None:
    job = live.submit(as_series(np.tile(pixels, (20, 1, 1, 1))), time="all", diameter=DIAMETER)
    wait_until(lambda: (live.show(job)["time_points"] or {"done": 0})["done"] > 0)
    report = live.show(job)
    assert report["time_points"]["total"] == 100
    assert report["progress"]["total"] >= 100

    live.client.delete(f"/jobs/{job['id']}")

    assert live.show(job)["state"] == "cancelled"
    wait_until(lambda: not live.runtime.devices.running_jobs and live.leftovers() == [])
    assert live.result(job).status_code == 410


@pytest.mark.skipif(find_spec("laptrack") is None, reason="laptrack is not installed")
def test_laptrack_links_objects_over_time(live: LiveServer, pixels: NDArray[np.uint8]) -> None:
    """The objects move little, so most tracks span at least all but one of the time points."""
    response = live.segment(as_series(pixels), time="all", diameter=DIAMETER, link="laptrack", measurements="csv")

    assert response.status_code == 200, response.text
    rows = list(csv.DictReader(io.StringIO(response.text)))
    track_lengths = Counter(row["track_id"] for row in rows)
    assert {row["track_id"] for row in rows if row["time"] == "0"} <= set(track_lengths)
    assert sum(count for count in track_lengths.values() if count >= len(pixels) - 1) > len(rows) / 2


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"time": "2:9"}, "time=0 to time=4"),
        ({"time": "5:"}, "time=0 to time=4"),
        ({"time": "4:2"}, "a range such as 2:5"),
        ({"time": "2", "link": "overlap"}, "time=all"),
        ({"link": "overlap"}, "time=all"),
        ({"time": "all", "link": "overlap", "output": "probabilities"}, "only labels"),
    ],
)
def test_invalid_series_parameters_are_refused(
    live: LiveServer, pixels: NDArray[np.uint8], parameters: dict[str, str], words: str
) -> None:
    for path in ("/segment", "/jobs", "/inspect"):
        response = live.client.post(path, content=as_series(pixels), params=parameters)
        assert response.status_code == 422, path
        assert words in response.json()["detail"]


def test_inspect_segment_and_jobs_require_a_time_point(live: LiveServer, pixels: NDArray[np.uint8]) -> None:
    stack = as_series(pixels)
    problem = live.client.post("/inspect", content=stack).json()["problem"]
    for path in ("/segment", "/jobs"):
        response = live.client.post(path, content=stack)
        assert (response.status_code, response.json()["detail"]) == (422, problem)
    assert "time=all" in problem
    for time in ("4", "all"):
        assert live.client.post("/inspect", content=stack, params={"time": time}).json()["problem"] is None


def test_probabilities_of_a_series_have_a_channel_axis(live: LiveServer, pixels: NDArray[np.uint8]) -> None:
    response = live.segment(as_series(pixels), time=":2", diameter=DIAMETER, output="probabilities")
    with tifffile.TiffFile(io.BytesIO(response.content)) as file:
        assert file.series[0].axes == "TCZYX"
        assert file.series[0].shape[0] == 2


def test_planes_of_each_time_point_of_a_result_can_be_read(live: LiveServer, pixels: NDArray[np.uint8]) -> None:
    job = live.run(as_series(pixels), time="1:3", link="overlap", diameter=DIAMETER, measurements="zip")
    archive = zipfile.ZipFile(io.BytesIO(live.result(job).content))
    labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
    for time in range(2):
        answer = live.client.get(f"/jobs/{job['id']}/planes", params={"time": time})
        assert np.array_equal(np.frombuffer(answer.content, answer.headers["x-stackseg-dtype"]), labels[time].ravel())
    for query in ({}, {"time": 2}):
        assert live.client.get(f"/jobs/{job['id']}/planes", params=query).status_code == 422
