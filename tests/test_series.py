"""Several time points of one file, through a real server and the command line."""

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
from fakes import until
from live import Answer, Live, as_tiff, eager, serve
from numpy.typing import NDArray
from paths import ROOT

from scripts.recipes.synthetic_nuclei import synthesise
from service.__main__ import main
from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader

POINTS = 5
# No resampling, and no estimate.
WIDTH = "20,20,20px"


def as_series(pixels: NDArray[Any], **options: Any) -> bytes:
    metadata = {"axes": "TZYX", "spacing": 0.5, "unit": "um", "finterval": 5.0, "tunit": "min"}
    return as_tiff(pixels, metadata=metadata, **options)


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint8]:
    """Nuclei that move across five time points, [T, Z, Y, X]."""
    image, _labels = synthesise(np.random.default_rng(0), (12, 56, 56))
    return np.stack([image[:, 2 * time : 2 * time + 48, time : time + 48] for time in range(POINTS)])


@pytest.fixture(scope="module")
def damaged(pixels: NDArray[np.uint8]) -> bytes:
    """Of time point 3 the compressed pixels are overwritten."""
    content = as_series(pixels, compression="zlib")
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page = file.pages[3 * pixels.shape[1]]
        start, count = page.dataoffsets[0], page.databytecounts[0]
    return content[:start] + b"\xff" * count + content[start + count :]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    scratch = tmp_path_factory.mktemp("scratch")
    with serve(eager(ROOT / "models", server={"scratch_folder": scratch})) as running:
        yield running


@pytest.fixture(scope="module")
def alone(live: Live, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The labels of each time point alone."""
    stack = as_series(pixels)
    return [Answer(live.segment(stack, time=time, diameter=WIDTH).content).pixels for time in range(POINTS)]


@pytest.mark.parametrize(("text", "times"), [("all", range(5)), ("1:3", range(1, 3)), ("3:", range(3, 5))])
def test_each_time_point_has_the_labels_that_it_has_alone(
    live: Live, pixels: NDArray[np.uint8], alone: list[NDArray[Any]], text: str, times: range, tmp_path: Path
) -> None:
    response = live.segment(as_series(pixels), time=text, diameter=WIDTH)

    assert response.status_code == 200, response.text
    labels = tifffile.imread(io.BytesIO(response.content))
    np.testing.assert_array_equal(labels, np.stack([alone[time] for time in times]))
    assert int(response.headers["x-stackseg-objects"]) == sum(int(alone[time].max()) for time in times) > 0
    path = tmp_path / "labels.ome.tif"
    path.write_bytes(response.content)
    found = stack_reader.inspect(path, Selection(), 2**20)
    assert (found.axes, found.stored_shape) == ("TZYX", (len(times), *pixels.shape[1:]))
    assert (found.voxel_size, found.time_interval) == (VoxelSize(0.5, 0.2, 0.2), TimeInterval(5, "min"))
    with tifffile.TiffFile(path) as file:
        seen = tifffile.tifffile.imagej_description_metadata(file.pages.first.tags.getall(270)[1].value)
    assert (seen["frames"], seen["slices"], seen["finterval"], seen["tunit"]) == (len(times), 12, 5, "min")
    assert live.leftovers() == []


def test_objects_keep_their_numbers_through_time(
    live: Live, pixels: NDArray[np.uint8], alone: list[NDArray[Any]]
) -> None:
    response = live.segment(as_series(pixels), time="all", diameter=WIDTH, link="overlap", measurements="zip")

    assert response.status_code == 200, response.text
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
        rows = list(csv.DictReader(io.StringIO(archive.read("measurements.csv").decode())))
    for linked, own in zip(labels, alone, strict=True):
        # The same objects under other numbers.
        pairs = np.unique(np.stack((linked.ravel(), own.ravel())), axis=1)
        assert pairs.shape[1] == len(np.unique(own)) == len(np.unique(linked))
    assert int(response.headers["x-stackseg-objects"]) == labels.max() < sum(own.max() for own in alone) / 2
    assert len({tuple(row[name] for name in ("time", "track_id")) for row in rows}) == len(rows)
    for time, volume in enumerate(labels):
        mine = [row for row in rows if row["time"] == str(time)]
        assert [int(row["track_id"]) for row in mine] == np.unique(volume[volume > 0]).tolist()
        assert all(row["label"] == row["track_id"] for row in mine)
        assert [int(row["num_pixels"]) for row in mine] == np.bincount(volume[volume > 0])[1:][
            np.unique(volume[volume > 0]) - 1
        ].tolist()
        assert {int(row["parent"]) for row in mine} <= {0, *map(int, np.unique(labels[:time]))}


def test_a_job_keeps_the_time_points_before_a_damaged_one(
    live: Live, damaged: bytes, alone: list[NDArray[Any]]
) -> None:
    job = live.submit(damaged, time="all", diameter=WIDTH)
    report = live.wait(job, "done", "failed")
    assert (report["state"], report["time_points"]) == ("failed", {"done": 3, "total": 5})
    assert "Time point 3" in report["problem"]["detail"]
    assert report["problem"]["type"].endswith("bad-file")
    assert any("Time point 3" in warning for warning in report["warnings"])
    result = live.result(job)
    assert result.status_code == 200
    assert "Time point 3" in result.headers["x-stackseg-note"]
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(result.content)), np.stack(alone[:3]))


def test_whoever_waits_is_told_which_part_can_be_had(live: Live, damaged: bytes) -> None:
    response = live.segment(damaged, time="1:", diameter=WIDTH)
    assert response.status_code == 422
    assert "Time point 3" in response.json()["detail"]
    assert "time=1:3" in response.json()["detail"]
    # Of the first one there is nothing before it.
    assert "time=3:3" not in live.segment(damaged, time="3:", diameter=WIDTH).json()["detail"]
    assert live.leftovers() == []


def test_command_line_keeps_the_time_points_before_a_damaged_one(
    damaged: bytes, alone: list[NDArray[Any]], configure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, out, table = tmp_path / "series.tif", tmp_path / "out.tif", tmp_path / "out.csv"
    stack.write_bytes(damaged)
    command = ["segment", str(stack), str(out), "--time", "all", "--diameter", WIDTH, "--measurements", str(table)]

    assert main([*command, "--config", str(configure(ROOT / "models"))]) == 1

    printed = capsys.readouterr()
    assert "3 of 5 time points" in printed.out
    assert "Time point 3" in printed.err
    np.testing.assert_array_equal(tifffile.imread(out), np.stack(alone[:3]))
    with table.open(newline="") as file:
        assert {row["time"] for row in csv.DictReader(file)} == {"0", "1", "2"}


def test_a_series_is_cancelled_in_the_middle(live: Live, pixels: NDArray[np.uint8]) -> None:
    job = live.submit(as_series(np.tile(pixels, (20, 1, 1, 1))), time="all", diameter=WIDTH)
    until(lambda: (live.show(job)["time_points"] or {"done": 0})["done"] > 0)
    report = live.show(job)
    assert report["time_points"]["total"] == 100
    assert report["progress"]["total"] >= 100

    live.client.delete(f"/jobs/{job['id']}")

    assert live.show(job)["state"] == "cancelled"
    until(lambda: not live.runtime.devices.running and live.leftovers() == [])
    assert live.result(job).status_code == 410


@pytest.mark.skipif(find_spec("laptrack") is None, reason="laptrack is not installed")
def test_objects_are_linked_by_least_movement(live: Live, pixels: NDArray[np.uint8]) -> None:
    """Objects of this series hardly move, so most go through all time points but for those that leave the picture."""
    response = live.segment(as_series(pixels), time="all", diameter=WIDTH, link="laptrack", measurements="csv")

    assert response.status_code == 200, response.text
    rows = list(csv.DictReader(io.StringIO(response.text)))
    points = Counter(row["track_id"] for row in rows)
    assert {row["track_id"] for row in rows if row["time"] == "0"} <= set(points)
    assert sum(count for count in points.values() if count >= len(pixels) - 1) > len(rows) / 2


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"time": "2:9"}, "time=0 to time=4"),
        ({"time": "5:"}, "time=0 to time=4"),
        ({"time": "4:2"}, "range without its end"),
        ({"time": "2", "link": "overlap"}, "time=all"),
        ({"link": "overlap"}, "time=all"),
        ({"time": "all", "link": "overlap", "output": "probabilities"}, "only labels"),
    ],
)
def test_what_a_series_cannot_have_is_refused(
    live: Live, pixels: NDArray[np.uint8], parameters: dict[str, str], words: str
) -> None:
    for path in ("/segment", "/jobs", "/inspect"):
        response = live.client.post(path, content=as_series(pixels), params=parameters)
        assert response.status_code == 422, path
        assert words in response.json()["detail"]


def test_inspect_says_that_a_time_point_has_to_be_chosen(live: Live, pixels: NDArray[np.uint8]) -> None:
    """As `/segment` and `/jobs` do."""
    stack = as_series(pixels)
    problem = live.client.post("/inspect", content=stack).json()["problem"]
    for path in ("/segment", "/jobs"):
        response = live.client.post(path, content=stack)
        assert (response.status_code, response.json()["detail"]) == (422, problem)
    assert "time=all" in problem
    for time in ("4", "all"):
        assert live.client.post("/inspect", content=stack, params={"time": time}).json()["problem"] is None


def test_probabilities_of_a_series_have_channels(live: Live, pixels: NDArray[np.uint8]) -> None:
    response = live.segment(as_series(pixels), time=":2", diameter=WIDTH, output="probabilities")
    with tifffile.TiffFile(io.BytesIO(response.content)) as file:
        assert file.series[0].axes == "TCZYX"
        assert file.series[0].shape[0] == 2


def test_each_time_point_of_a_result_has_planes(live: Live, pixels: NDArray[np.uint8]) -> None:
    job = live.run(as_series(pixels), time="1:3", link="overlap", diameter=WIDTH, measurements="zip")
    archive = zipfile.ZipFile(io.BytesIO(live.result(job).content))
    labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
    for time in range(2):
        answer = live.client.get(f"/jobs/{job['id']}/planes", params={"time": time})
        assert np.array_equal(np.frombuffer(answer.content, answer.headers["x-stackseg-dtype"]), labels[time].ravel())
    for query in ({}, {"time": 2}):
        assert live.client.get(f"/jobs/{job['id']}/planes", params=query).status_code == 422
