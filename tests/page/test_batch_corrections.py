"""Tests of results of a batch that the user changes in the web UI: corrections, and advice for one stack."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from browsing import OpenPage, central_voxel, check_accessibility, download, find_crosshair, go_to, open_correct_tab
from live import LabelTiff, LiveServer, as_tiff
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

FILTERS_STORAGE_KEY = "stackseg-filters"


def segment_batch(page: Page, files: dict[str, bytes]) -> None:
    page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()])
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name=f"Segment {len(files)} stacks").click()
    expect(page.locator(".batch-list > li[data-phase=done]")).to_have_count(len(files))


def delete_object(page: Page, voxel: tuple[int, int, int]) -> None:
    open_correct_tab(page)
    page.get_by_role("button", name="Delete", exact=True).first.click()
    go_to(page, voxel)
    page.mouse.click(*find_crosshair(page))
    expect(page.get_by_role("tab", name="Correct")).to_contain_text("1 correction")


def read_rows(content: bytes | str, stack: str) -> dict[int, dict[str, str]]:
    text = content.decode() if isinstance(content, bytes) else content
    return {int(row["label"]): row for row in csv.DictReader(io.StringIO(text)) if row["stack"] == stack}


def test_files_of_a_batch_contain_the_corrected_objects(nuclei: LiveServer, open_page: OpenPage) -> None:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")
    page = open_page(nuclei, accept_downloads=True)
    segment_batch(page, {"a.tif": as_tiff(sample[8:24, 24:88, 24:88]), "b.tif": as_tiff(sample[8:24, 96:160, 24:88])})
    table = download(page, "Table (CSV)")
    page.get_by_role("button", name="Open: a.tif").click()
    page.get_by_role("tab", name="Export").click()
    labels = np.load(io.BytesIO(download(page, "Labels (NumPy)")))
    deleted, other = np.argsort(np.bincount(labels.ravel())[1:])[-2:] + 1
    delete_object(page, central_voxel(labels, deleted))
    page.get_by_role("link", name="Back to the batch").click()

    row = page.locator(".batch-list > li").filter(has=page.get_by_text("a.tif", exact=True))
    expect(row).to_contain_text(f"{labels.max() - 1} objects1 correction")
    check_accessibility(page)
    with page.expect_download() as download_info:
        page.get_by_role("button", name="ZIP").click()
    status = page.locator(".batch-head").get_by_role("status").last
    expect(status).to_contain_text("It contains your corrections of a.tif.")
    with zipfile.ZipFile(Path(download_info.value.path())) as archive:
        corrected = tifffile.imread(io.BytesIO(archive.read("labels/a_corrected.ome.tif")))
        assert "labels/b_labels.ome.tif" in archive.namelist()
        corrected_table = archive.read("objects.csv").decode()
        report = archive.read("report.html").decode()
    assert np.array_equal(corrected, np.where(labels == deleted, 0, labels))
    assert f"<td>{labels.max() - 1}, with 1 correction</td>" in report
    assert read_rows(corrected_table, "b.tif") == read_rows(table, "b.tif")
    before, after = read_rows(table, "a.tif"), read_rows(corrected_table, "a.tif")
    assert after.keys() == before.keys() - {deleted}
    for column in ("num_pixels", "area", "intensity_mean", "intensity_max", "confidence", "centroid-2"):
        assert np.isclose(float(after[other][column]), float(before[other][column]), rtol=1e-6), column
    assert {value["unit"] for value in after.values()} == {"um"}

    # Only the largest object is within the limits.
    job = next(job["id"] for job in nuclei.client.get("/jobs").json()["jobs"] if job["name"] == "a.tif")
    sizes = {label: int(row["num_pixels"]) for label, row in after.items()}
    largest = max(sizes, key=sizes.__getitem__)
    limits = [{"job": job, "limits": [["num_pixels", sizes[largest], None]], "shown": 1}]
    page.evaluate("([key, limits]) => localStorage.setItem(key, JSON.stringify(limits))", [FILTERS_STORAGE_KEY, limits])
    page.reload()
    expect(row).to_contain_text(f"1 of {labels.max() - 1} objects")
    assert read_rows(download(page, "Table (CSV)"), "a.tif").keys() == {largest}

    # The number of corrected objects is known only for the recent results of this browser.
    page.evaluate("localStorage.clear()")
    page.reload()
    expect(row).to_contain_text(f"{labels.max()} objects before1 correction")


def test_archive_of_a_batch_contains_the_corrected_time_points(nuclei: LiveServer, open_page: OpenPage) -> None:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[8:24]
    series = np.stack([sample[:, shift : shift + 48, :48] for shift in (0, 1, 2)])
    page = open_page(nuclei, accept_downloads=True)
    files = {"one.tif": as_tiff(sample[:, :48, :48]), "series.tif": as_tiff(series, metadata={"axes": "TZYX"})}
    page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()])
    page.get_by_label("Time points").select_option("all")
    page.get_by_label("Track objects over time").check()
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name="Segment 2 stacks").click()
    expect(page.locator(".batch-list > li[data-phase=done]")).to_have_count(2)
    original, table = read_archive(page)
    before = read_series(table)
    page.get_by_role("button", name="Open: series.tif").click()
    open_correct_tab(page)
    panel = page.get_by_role("tabpanel", name="Correct")
    expect(panel).to_contain_text("These are the labels of time point 1")
    page.get_by_role("button", name="Next time point").click()
    expect(panel).to_contain_text("These are the labels of time point 2")
    largest = int(np.argmax(np.bincount(original[1].ravel())[1:])) + 1
    delete_object(page, central_voxel(original[1], largest))
    # Draw an object in the empty place of the deleted one. Its number must not be that of a track.
    page.get_by_role("button", name="Brush").click()
    page.mouse.click(*find_crosshair(page))
    expect(page.get_by_role("tab", name="Correct")).to_contain_text("2 corrections")

    page.get_by_role("link", name="Back to the batch").click()
    expect(page.locator(".batch-list")).to_contain_text("2 corrections")
    corrected, table = read_archive(page)
    expect(page.locator(".batch-head")).to_contain_text("It contains your corrections of series.tif.")
    new = int(original.max()) + 1
    assert corrected.shape == original.shape
    assert np.array_equal(corrected[[0, 2]], original[[0, 2]])
    assert np.array_equal(
        np.where(corrected[1] == new, 0, corrected[1]), np.where(original[1] == largest, 0, original[1])
    )
    after = read_series(table)
    assert after.keys() == before.keys() - {(largest, 1)} | {(new, 1)}
    assert int(after[new, 1]["num_pixels"]) == np.count_nonzero(corrected == new) > 0
    assert (after[new, 1]["track_id"], after[new, 1]["parent"]) == (str(new), "0")
    for key in after.keys() - {(new, 1)}:
        assert {**after[key]}.keys() == {**before[key]}.keys()
        for column, value in before[key].items():
            same = after[key][column] == value or np.isclose(float(after[key][column]), float(value), rtol=1e-6)
            assert same, (key, column)


def read_archive(page: Page) -> tuple[NDArray[Any], str]:
    """Return the labels of the series [T, Z, Y, X] and the table in the archive of a batch."""
    with page.expect_download() as download_info:
        page.get_by_role("button", name="ZIP").click()
    with zipfile.ZipFile(Path(download_info.value.path())) as archive:
        (name,) = [name for name in archive.namelist() if name.startswith("labels/series")]
        tiff = LabelTiff(archive.read(name))
        assert tiff.axes == "TZYX"
        return tiff.pixels, archive.read("objects.csv").decode()


def read_series(table: str) -> dict[tuple[int, int], dict[str, str]]:
    """Return the rows of the series by label and time point."""
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row["stack"] == "series.tif"]
    return {(int(row["label"]), int(row["time"])): row for row in rows}


def test_advice_is_followed_for_one_stack_and_a_broken_file_is_removed(nuclei: LiveServer, open_page: OpenPage) -> None:
    membranes = as_tiff(tifffile.imread(ROOT / "models" / "membranes" / "sample.tif")[8:48, 24:88, 24:88])
    page = open_page(nuclei)
    files = {"broken.tif": membranes[:5000], "cells.tif": membranes}
    page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()])
    rows = page.locator(".batch-list > li")
    expect(page.get_by_role("button", name="Annotate by hand")).to_be_hidden()
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name="Segment 1 stack").click()
    advice = page.get_by_role("button", name="Try the model membranes: cells.tif")
    advice.click()
    expect(rows.last).to_contain_text("Own settings: Model: membranes")
    expect(page.locator(".batch-list > li[data-phase=done]")).to_have_count(1)
    expect(advice).to_have_count(0)
    page.get_by_role("button", name="Remove: broken.tif").click()
    expect(rows).to_have_count(1)
    expect(page.get_by_role("status").first).to_contain_text("1 of 1 stack segmented")
    # The file gets another place in the list, and the stored picture of the other stack does not change.
    page.set_input_files("#batch input[type=file]", {"name": "flat.tif", "mimeType": "", "buffer": membranes[:4000]})
    expect(rows).to_have_count(2)
    expect(rows.locator("img")).to_have_count(1)
    picture = rows.first.locator("img").get_attribute("src")
    page.wait_for_timeout(500)
    page.reload()
    expect(rows).to_have_count(2)
    expect(rows.first.locator("img")).to_have_attribute("src", str(picture))
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_advice_that_was_followed_in_the_viewer_is_not_repeated(nuclei: LiveServer, open_page: OpenPage) -> None:
    membranes = as_tiff(tifffile.imread(ROOT / "models" / "membranes" / "sample.tif")[8:48, 24:88, 24:88])
    page = open_page(nuclei)
    files = {"broken.tif": membranes[:5000], "cells.tif": membranes}
    page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()])
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name="Segment 1 stack").click()
    row = page.locator(".batch-list > li").last
    expect(page.get_by_role("button", name="Try the model membranes: cells.tif")).to_be_visible()
    buttons = row.locator(".batch-buttons button")
    tops = buttons.evaluate_all("nodes => nodes.map(node => Math.round(node.getBoundingClientRect().top))")
    assert len(tops) == 2
    assert len({*tops}) == 1

    page.get_by_role("button", name="Open: cells.tif").click()
    page.locator(".notes .warning").get_by_role("button", name="Try the model membranes").click()
    expect(page.locator("#side")).to_contain_text("membranes/1")
    page.get_by_role("link", name="Back to the batch").click()
    expect(row).to_contain_text("A newer result of membranes has ")
    expect(page.get_by_role("button", name="Try the model membranes: cells.tif")).to_have_count(0)

    page.get_by_role("button", name="Settings: cells.tif").click()
    reset_button = page.get_by_role("button", name="Reset to the settings for all stacks")
    expect(reset_button).to_be_hidden()
    assert page.evaluate("document.activeElement.tagName") in {"INPUT", "SELECT"}
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Use the newer result").click()
    expect(row).to_contain_text("Own settings: Model: membranes")
    page.get_by_role("button", name="Settings: cells.tif").click()
    reset_button.click()
    expect(row).not_to_contain_text("Own settings")
    expect(reset_button).to_be_hidden()
