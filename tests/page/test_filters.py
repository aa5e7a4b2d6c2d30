"""Filters of objects in the web UI: views, table, files and corrections, and results with other settings."""

from __future__ import annotations

import csv
import gzip
import io
import re
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import TIMEOUT_SECONDS, OpenPage, central_voxel, check_accessibility, download
from fakes import wait_until
from live import LabelTiff, LiveServer, as_tiff
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

# Returns the number of pixels of the XY view that show objects.
COUNT_OBJECT_PIXELS = """() => {
  const canvas = document.querySelector(".view[data-axis=z] canvas.overlay");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((_, index) => index % 4 === 3 && data[index] > 0).length;
}"""

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def job(nuclei: LiveServer) -> dict[str, Any]:
    image = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[8:44, 40:136, 40:136]
    stack = nuclei.post("/stacks", as_tiff(image)).json()["id"]
    return nuclei.run(b"", stack=stack, diameter="12,25,25px", measurements="zip")


@pytest.fixture(scope="module")
def labels(nuclei: LiveServer, job: dict[str, Any]) -> NDArray[Any]:
    return LabelTiff(nuclei.result(job, Accept="image/tiff").content).pixels


@pytest.fixture(scope="module")
def rows(nuclei: LiveServer, job: dict[str, Any]) -> Rows:
    return read_rows(nuclei.result(job, Accept="text/csv").content)


def read_rows(content: bytes) -> Rows:
    return list(csv.DictReader(io.StringIO(content.decode())))


def open_job(live: LiveServer, open_page: OpenPage, job: dict[str, Any]) -> Page:
    page = open_page(live, accept_downloads=True)
    page.goto(f"/#job={job['id']}")
    expect(page.locator("#summary")).to_contain_text("objects")
    return page


def set_field(page: Page, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Enter")


def test_displayed_objects_are_the_exported_objects(
    nuclei: LiveServer, open_page: OpenPage, job: dict[str, Any], labels: NDArray[Any], rows: Rows
) -> None:
    page = open_job(nuclei, open_page, job)
    min_confidence = round(100 * sorted(float(row["confidence"]) for row in rows)[len(rows) // 2])
    set_field(page, "Smallest Confidence, %", str(min_confidence))
    slider = page.get_by_label("Smallest Volume, µm³, slider")
    slider.focus()
    for _ in range(40):
        slider.press("ArrowRight")
    volume = float(page.get_by_label("Smallest Volume, µm³", exact=True).input_value())
    kept = [row for row in rows if float(row["confidence"]) >= min_confidence / 100 and float(row["area"]) >= volume]
    assert 1 < len(kept) < len([row for row in rows if float(row["area"]) >= volume]) < len(rows)
    count = f"{len(kept)} of {len(rows)} objects"
    expect(page.locator("#summary")).to_contain_text(count)
    expect(page.locator(".filter-panel")).to_contain_text(count)
    expect(page.locator("table.objects tbody tr[data-label]")).to_have_count(len(kept))
    check_accessibility(page)

    page.get_by_role("tab", name="Export").click()
    expect(page.locator("#export-content")).to_contain_text(count)
    expect(page.locator("#export-content")).to_contain_text("without corrections")
    expected_labels = np.where(np.isin(labels, [int(row["label"]) for row in kept]), labels, 0)
    assert np.array_equal(tifffile.imread(io.BytesIO(download(page, "Labels (OME-TIFF)"))), expected_labels)
    assert np.array_equal(np.load(io.BytesIO(download(page, "Labels (NumPy)"))), expected_labels)
    assert read_rows(download(page, "Table (CSV)")) == kept

    page.reload()
    expect(page.locator("#summary")).to_contain_text(count)
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#summary")).not_to_contain_text(" of ")


def test_views_hide_the_objects_outside_the_limits(
    nuclei: LiveServer, open_page: OpenPage, job: dict[str, Any], rows: Rows
) -> None:
    page = open_job(nuclei, open_page, job)
    wait_until(lambda: page.evaluate(COUNT_OBJECT_PIXELS) > 0, TIMEOUT_SECONDS)
    whole_count = sum(row["touching_border"] == "False" for row in rows)
    page.get_by_label("Whole objects only").check()
    expect(page.locator("#summary")).to_contain_text(f"{whole_count} of {len(rows)} objects")
    set_field(page, "Largest Volume, µm³", "0.001")
    expect(page.locator("#summary")).to_have_text(f"0 of {len(rows)} objects.")
    wait_until(lambda: page.evaluate(COUNT_OBJECT_PIXELS) == 0, TIMEOUT_SECONDS)
    # Without a limit, the value of the field is empty again.
    set_field(page, "Largest Volume, µm³", "")
    expect(page.locator("#summary")).to_contain_text(f"{whole_count} of {len(rows)} objects")


def test_corrected_objects_are_filtered_and_exported(
    nuclei: LiveServer, open_page: OpenPage, job: dict[str, Any], labels: NDArray[Any], rows: Rows
) -> None:
    page = open_job(nuclei, open_page, job)
    deleted, *others = sorted(rows, key=lambda row: -float(row["area"]))
    page.get_by_role("tab", name="Correct").click()
    page.get_by_role("button", name="Delete", exact=True).wait_for()
    for axis, position in zip("zyx", central_voxel(labels, int(deleted["label"])), strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(position))
    stage = page.locator(".view[data-axis=z] .stage")
    stage.press("Enter")
    stage.press("Delete")
    expect(page.locator(".correct")).to_contain_text("1 deleted")
    page.get_by_role("tab", name="Objects").click()
    min_confidence = round(100 * sorted(float(row["confidence"]) for row in others)[len(others) // 3], 1)
    set_field(page, "Smallest Confidence, %", str(min_confidence))
    kept = [row for row in others if float(row["confidence"]) >= min_confidence / 100]
    count = f"{len(kept)} of {len(others)} objects"
    expect(page.locator("#summary")).to_contain_text(count)
    expect(page.locator("#summary")).to_contain_text("Includes corrections.")

    page.get_by_role("tab", name="Export").click()
    expect(page.locator("#export-content")).to_contain_text(count)
    expect(page.locator("#export-content")).to_contain_text("with 1 correction")
    expected_labels = np.where(np.isin(labels, [int(row["label"]) for row in kept]), labels, 0)
    assert np.array_equal(tifffile.imread(io.BytesIO(download(page, "Labels (OME-TIFF)"))), expected_labels)
    # The header is that of the service, so that both files have the same orientation.
    original = gzip.decompress(nuclei.result(job, Accept="application/x-nifti").content)
    nifti = gzip.decompress(download(page, "Labels (NIfTI)"))
    assert nifti == original[:352] + expected_labels.astype(labels.dtype).tobytes()
    exported = read_rows(download(page, "Table (CSV)"))
    assert [row["label"] for row in exported] == [
        row["label"] for row in sorted(kept, key=lambda row: int(row["label"]))
    ]


def test_intensities_are_those_of_the_segmented_channel(nuclei: LiveServer, open_page: OpenPage) -> None:
    image = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[8:32, 40:88, 40:88]
    pixels = np.stack([np.full_like(image, 7), image], axis=1)
    tifffile.imwrite(
        file := io.BytesIO(),
        pixels,
        ome=True,
        metadata={"axes": "ZCYX", "Channel": {"Name": ["Empty", "DAPI"]}, "PhysicalSizeZ": 0.5}
        | dict.fromkeys(("PhysicalSizeY", "PhysicalSizeX"), 0.2),
    )
    stack = nuclei.post("/stacks", file.getvalue()).json()["id"]
    job = nuclei.run(b"", stack=stack, channel=1, diameter="12,25,25px", measurements="zip")
    means = [float(row["intensity_mean-1"]) for row in read_rows(nuclei.result(job, Accept="text/csv").content)]
    page = open_job(nuclei, open_page, job)
    names = page.locator("table.objects th").all_inner_texts()
    assert [name for name in names if name.startswith("Mean")] == ["Mean DAPI", "Mean Empty"]
    histogram = page.get_by_role("img", name="Histogram of Mean intensity")
    expect(histogram).to_have_attribute("aria-label", re.compile(f"from {min(means):.3g} to {max(means):.3g}$"))


def test_histogram_of_equal_values_has_one_value_as_its_limits(nuclei: LiveServer, open_page: OpenPage) -> None:
    limits = open_page(nuclei).evaluate("""async () => {
      const { Histogram } = await import("/page/result/histogram.js");
      return [[0.992], []].map(values => new Histogram("", Float64Array.from(values), 100))
        .map(({ fields }) => fields.map(({ placeholder }) => placeholder));
    }""")
    assert limits == [["99.2", "99.2"], ["\N{EN DASH}", "\N{EN DASH}"]]


def test_result_of_earlier_settings_is_marked(nuclei: LiveServer, open_page: OpenPage, job: dict[str, Any]) -> None:
    page = open_job(nuclei, open_page, job)
    notice = page.locator(".stale-notice")
    expect(notice).to_be_hidden()
    diameter = page.get_by_label("How the object diameter is determined")
    diameter.select_option("none")
    expect(notice).to_contain_text("before you changed: Object diameter.")
    check_accessibility(page)
    diameter.select_option("12,25,25px")
    expect(notice).to_be_hidden()
    diameter.select_option("none")
    notice.get_by_role("button", name="Segment again").click()
    expect(page.locator(".result-switcher button[aria-current]")).to_contain_text("original resolution")
    expect(notice).to_be_hidden()
    page.get_by_role("button", name="Segment again with them").click()
    expect(page.locator(".result-switcher button[aria-current]")).to_contain_text("Minimum confidence: 0")
    newest = nuclei.client.get("/jobs").json()["jobs"][0]["parameters"]
    assert (newest["min_confidence"], newest["minimum_size"], newest["border"]) == (0, "1", "keep")
    assert newest["diameter"] == "none"
    expect(page.get_by_role("button", name="Segment again with them")).to_have_count(0)


def test_compared_results_show_the_objects_within_their_limits(
    nuclei: LiveServer, open_page: OpenPage, job: dict[str, Any], rows: Rows
) -> None:
    page = open_job(nuclei, open_page, job)
    median = sorted(float(row["area"]) for row in rows)[len(rows) // 2]
    set_field(page, "Smallest Volume, µm³", str(median))
    kept_count = int(page.locator(".filter-panel span").first.inner_text().split(" of ")[0])
    assert 1 < kept_count < len(rows)
    parameters = {name: job["parameters"][name] for name in ("stack", "diameter")}
    other_job = nuclei.run(b"", **parameters, min_confidence=0.01, measurements="zip")

    page.goto(f"/#compare={job['id']},{other_job['id']}")
    left, right = page.locator(".side-by-side").first, page.locator(".side-by-side").last
    footer = page.locator("#compare footer")
    expect(left).to_contain_text(f"{kept_count} of {len(rows)} objects, confidence ")
    other_count = other_job["objects"]
    hidden_count = other_count - kept_count
    expect(footer).to_contain_text(
        f"{kept_count} objects in both (overlap above 50%), 0 only in the first, {hidden_count}"
    )
    right.get_by_text("Filter the objects").click()
    field = right.get_by_label("Smallest Volume, µm³", exact=True)
    field.fill(str(median))
    field.press("Enter")
    expect(right).to_contain_text(f"{kept_count} of {other_count} objects")
    expect(footer).to_contain_text("0 only in the first, 0 only in the second")
    check_accessibility(page)
    right.get_by_role("link", name="Open this result").click()
    expect(page.locator("#summary")).to_contain_text(f"{kept_count} of {other_count} objects")
