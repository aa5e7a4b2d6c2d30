"""Filters of objects in the results of a real server."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import wait_until
from live import LiveServer, as_tiff, make_live_fixture, parse_problem
from numpy.typing import NDArray
from paths import ROOT

from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.tiff.writer import read_provenance

Rows = list[dict[str, str]]


live = make_live_fixture(ROOT / "models")


@pytest.fixture(scope="module")
def image() -> NDArray[Any]:
    return np.asarray(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[8:44, 40:136, 40:136])


@pytest.fixture(scope="module")
def job(live: LiveServer, image: NDArray[Any]) -> dict[str, Any]:
    return live.run(as_tiff(image), diameter="12,25,25px", measurements="zip", min_confidence=0)


def download(live: LiveServer, job: dict[str, Any], media_type: str, *limits: str) -> Any:
    headers = {"Accept": media_type}
    response = live.client.get(f"/jobs/{job['id']}/result", params={"filter": list(limits)}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def read_archive(content: bytes, folder: Path) -> tuple[NDArray[Any], Rows, Path]:
    """Return the labels and the rows of an archive, and the path of the extracted labels."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        rows = list(csv.DictReader(io.StringIO(archive.read("measurements.csv").decode())))
        path = Path(archive.extract("labels.ome.tif", folder))
    return tifffile.imread(path), rows, path


@pytest.mark.parametrize("limits", [(), ("confidence:0.1:",)])
def test_interrupted_download_of_a_conversion_is_resumed(
    limits: tuple[str, ...], live: LiveServer, job: dict[str, Any]
) -> None:
    media_types = ("application/zip", "image/tiff", "text/csv", "application/x-npy", "application/gzip")
    complete = {name: download(live, job, name, *limits) for name in (*media_types, "application/x-ozx")}
    # The times in zip archives have a resolution of 2 s.
    sleep(2.1)
    for media_type, first in complete.items():
        etag, middle = first.headers["etag"], len(first.content) // 2

        def get(media_type: str = media_type, **headers: str) -> Any:
            url, params = f"/jobs/{job['id']}/result", {"filter": list(limits)}
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return live.client.get(url, params=params, headers={"Accept": media_type, **names})

        rest = get(Range=f"bytes={middle}-", If_Range=etag)
        assert (rest.status_code, rest.headers["etag"]) == (206, etag)
        assert rest.content == first.content[middle:]
        unchanged = get(If_None_Match=etag)
        assert (unchanged.status_code, unchanged.headers["etag"], unchanged.content) == (304, etag, b"")
        assert parse_problem(get(If_Match='"other"')) == (412, "precondition-failed")
        assert download(live, job, media_type, "confidence:0.2:").headers["etag"] != etag
    assert len({first.headers["etag"] for first in complete.values()}) == len(complete)


def test_labels_and_table_contain_only_the_objects_within_the_limits(
    live: LiveServer, job: dict[str, Any], tmp_path: Path
) -> None:
    labels, rows, path = read_archive(download(live, job, "application/zip").content, tmp_path / "all")
    confidence = sorted(float(row["confidence"]) for row in rows)[len(rows) // 3]
    limits = (f"confidence:{confidence}:", "touching_border:0:0", "area:8:1e3")
    kept = [
        row
        for row in rows
        if float(row["confidence"]) >= confidence
        and row["touching_border"] == "False"
        and 8 <= float(row["area"]) <= 1000
    ]
    assert 0 < len(kept) < len(rows)

    archive = download(live, job, "application/zip", *limits)
    filtered_labels, filtered_rows, filtered_path = read_archive(archive.content, tmp_path / "filtered")

    expected_labels = np.where(np.isin(labels, [int(row["label"]) for row in kept]), labels, 0)
    assert filtered_rows == kept
    np.testing.assert_array_equal(filtered_labels, expected_labels)
    assert filtered_labels.dtype == labels.dtype
    assert int(archive.headers["x-stackseg-objects"]) == len(kept)
    assert "x-stackseg-confidence" not in archive.headers
    provenance = read_provenance(filtered_path)
    assert provenance.pop("filter") == (
        f"confidence:{confidence}:, touching_border:0:0, area:8:1000 ({len(kept)} of {len(rows)} objects)"
    )
    assert provenance == read_provenance(path)
    assert stack_reader.inspect(filtered_path, Selection(), 2**20).voxel_size == VoxelSize(0.5, 0.2, 0.2)
    for media_type, load in (("image/tiff", tifffile.imread), ("application/x-npy", np.load)):
        content = download(live, job, media_type, *limits).content
        np.testing.assert_array_equal(load(io.BytesIO(content)), expected_labels)
    table = download(live, job, "text/csv", *limits)
    assert list(csv.DictReader(io.StringIO(table.text))) == kept
    assert "measurements.csv" in table.headers["content-disposition"]
    wait_until(lambda: live.leftovers() == [])


def test_time_points_are_filtered_separately(live: LiveServer, image: NDArray[Any], tmp_path: Path) -> None:
    series = np.stack([image[:12, shift : shift + 48, :48] for shift in (0, 2, 4)])
    metadata = {"axes": "TZYX", "spacing": 0.5, "unit": "um", "finterval": 5.0, "tunit": "min"}
    job = live.run(
        as_tiff(series, metadata=metadata), time="1:3", link="overlap", diameter="12,25,25px", measurements="zip"
    )
    labels, rows, _path = read_archive(download(live, job, "application/zip").content, tmp_path / "all")
    area = sorted(float(row["area"]) for row in rows)[len(rows) // 2]
    archive = download(live, job, "application/zip", f"area:{area}:")
    filtered_labels, filtered_rows, path = read_archive(archive.content, tmp_path / "filtered")
    assert filtered_rows == [row for row in rows if float(row["area"]) >= area]
    for time, (volume, filtered_volume) in enumerate(zip(labels, filtered_labels, strict=True), start=1):
        kept = [int(row["label"]) for row in filtered_rows if row["time"] == str(time)]
        np.testing.assert_array_equal(filtered_volume, np.where(np.isin(volume, kept), volume, 0))
    assert int(archive.headers["x-stackseg-objects"]) == len({row["track_id"] for row in filtered_rows})
    description = stack_reader.inspect(path, Selection(), 2**20)
    assert (description.axes, description.time_interval) == ("TZYX", TimeInterval(5, "min"))


def test_filter_without_matching_objects_gives_empty_labels(live: LiveServer, job: dict[str, Any]) -> None:
    tiff = download(live, job, "image/tiff", "area::0")
    assert not tifffile.imread(io.BytesIO(tiff.content)).any()
    assert tiff.headers["x-stackseg-objects"] == "0"
    assert len(download(live, job, "text/csv", "area::0").text.splitlines()) == 1


@pytest.mark.parametrize("limit", ["area", "area:1", "area:2:1", ":1:2", "area:x:", "area:nan:", "a:1:2:3", "unit:0:1"])
def test_malformed_limits_are_refused(live: LiveServer, job: dict[str, Any], limit: str) -> None:
    response = live.client.get(f"/jobs/{job['id']}/result", params={"filter": limit})
    assert parse_problem(response) == (422, "bad-parameter")
    assert response.json()["parameter"] == "filter"


def test_result_without_a_table_cannot_be_filtered(live: LiveServer, image: NDArray[Any]) -> None:
    job = live.run(as_tiff(image[:12, :48, :48]), diameter="12,25,25px")
    response = live.client.get(f"/jobs/{job['id']}/result", params={"filter": "area:1:"})
    assert parse_problem(response) == (422, "bad-parameter")
    assert "measurements=zip" in response.json()["detail"]
