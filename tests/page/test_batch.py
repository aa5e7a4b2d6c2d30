"""Tests of batches in the web UI: several stacks with one set of settings, and their joined results."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import tifffile
from browsing import TIMEOUT_SECONDS, OpenPage, check_accessibility, press_segment
from fakes import FakeSegmenter, wait_until
from live import STACK, LiveServer, as_tiff, eager_settings, serve
from olympus_files import make_files, make_settings
from paths import ROOT
from playwright.sync_api import Locator, Page, Route, expect
from zarr_files import write_zarr

# Drops files on the page. Each file has a name and its content in hexadecimal digits.
DROP = """files => {
  const transfer = new DataTransfer();
  for (const [name, hex] of files)
    transfer.items.add(new File([Uint8Array.from(hex.match(/../g) ?? [], byte => parseInt(byte, 16))], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""

FIND_SHARED_DIAMETER = """async entries => {
  const { findSharedDiameter } = await import("/page/batch/shared_diameter.js");
  return findSharedDiameter(entries);
}"""


def drop(page: Page, files: dict[str, bytes]) -> None:
    expect(page.get_by_role("button", name="Choose files")).to_be_visible()
    page.evaluate(DROP, [[name, content.hex()] for name, content in files.items()])


def find_row(page: Page, name: str) -> Locator:
    return page.locator(".batch-list > li").filter(has=page.get_by_text(name, exact=True))


def test_shared_diameter_is_the_median_of_the_estimates(module_page: Page) -> None:
    size = {"z": 1.0, "y": 0.5, "x": 0.5}

    def find(*stacks: tuple[str, object]) -> str:
        entries = [
            {"report": {"state": "done", "diameter": diameter}, "inspection": {"file": {"voxel_size": voxel_size}}}
            for diameter, voxel_size in stacks
        ]
        return str(module_page.evaluate(FIND_SHARED_DIAMETER, [*entries, {"report": None, "inspection": None}]))

    estimates = [("10,18,18px; estimated", size), ("20px; estimated", size), ("14,32,32px; estimated", size)]
    # The second diameter has one length: 10 um along all axes.
    assert find(*estimates) == "10,10,10um"
    assert find(estimates[0], estimates[2], ("9px; stated", size)) == "12,12.5,12.5um"
    assert find(("10px; estimated", None), ("12,20,20px; estimated", None)) == "11,15,15px"
    assert find(estimates[0], ("20px; estimated", None)) == find(estimates[0]) == find() == ""


def test_each_file_of_a_folder_gets_a_result_or_a_reason(
    nuclei: LiveServer, open_page: OpenPage, tmp_path: Path
) -> None:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")
    crop = sample[8:24, 24:88, 24:88]
    unnamed = io.BytesIO()
    tifffile.imwrite(unnamed, np.stack([crop, crop]), photometric="minisblack", metadata={"axes": "QZYX"})
    channel_metadata = {"axes": "ZCYX", "spacing": 0.5, "unit": "um"}
    contents = {
        "a.tif": as_tiff(crop),
        "day 2/b.tif": as_tiff(sample[8:24, 96:160, 24:88]),
        "no voxel size.tif": as_tiff(crop, imagej=False, metadata=None),
        "channels.tif": as_tiff(np.stack([crop, 1000 - crop], 1), metadata=channel_metadata),
        "unnamed axis.tif": unnamed.getvalue(),
        "truncated.tif": as_tiff(crop)[:5000],
        "empty.tif": b"",
        "notes.txt": b"nuclei of day 2",
        ".DS_Store": b"\0",
        "movie.ome.zarr/note.txt": b"not an image",
    }
    folder = tmp_path / "embryos"
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_zarr(folder / "c.ome.zarr", crop[:, :48, :48], version="0.4")
    page = open_page(nuclei, accept_downloads=True)
    page.locator("#folder").set_input_files(folder)

    expect(page.locator("#title")).to_have_text("embryos")
    expect(page.locator(".batch-list > li")).to_have_count(8)
    left_out = page.locator(".batch-skipped li")
    expect(left_out).to_have_count(3)
    expect(left_out.filter(has_text="empty.tif")).to_contain_text("The file is empty")
    expect(find_row(page, "a.tif")).to_contain_text("64 × 64 × 16 voxels · 0.2 × 0.2 × 0.5 µm · axes ZYX")
    expect(find_row(page, "truncated.tif")).to_contain_text("truncated or damaged")
    expect(find_row(page, "movie.ome.zarr")).to_contain_text("Cannot be segmented")
    expect(find_row(page, "no voxel size.tif")).to_contain_text("voxel size unknown")
    expect(page.locator(".batch-picture img")).to_have_count(5)
    check_accessibility(page)
    page.get_by_role("button", name="Settings: unnamed axis.tif").click()
    page.get_by_role("button", name="CZYX", exact=True).click()
    expect(page.locator("dialog .previews canvas")).to_have_count(2)
    check_accessibility(page)
    page.get_by_role("button", name="Close").click()
    settings = page.get_by_role("region", name="Settings for all stacks")
    settings.get_by_label("Channel to segment").select_option("0")
    settings.get_by_label("How the object diameter is determined").select_option("none")
    for axis, length in (("x", "0.2"), ("y", "0.2"), ("z", "0.5")):
        settings.get_by_label(f"Voxel size along {axis}").fill(length)
        settings.get_by_label(f"Voxel size along {axis}").press("Tab")
    expect(find_row(page, "no voxel size.tif")).to_contain_text("0.2 × 0.2 × 0.5 µm")
    page.get_by_role("button", name="Segment 6 stacks").click()
    expect(page.get_by_role("status").first).to_contain_text("6 of 8 stacks segmented")
    expect(page.get_by_role("status").first).to_contain_text("2 failed")
    expect(page.locator(".batch-list > li[data-phase=done]")).to_have_count(6)
    check_accessibility(page)
    check_files(page, nuclei, contents)
    check_return_to_batch(page)


def test_files_with_the_same_name_are_separate_stacks(fake: LiveServer, open_page: OpenPage) -> None:
    found = open_page(fake).evaluate("""async () => {
      const { selectChosenFiles } = await import("/page/batch/collect_files.js");
      const files = [1, 2].map(size => new File(["x".repeat(size)], "cells.ome.tif"));
      const found = await selectChosenFiles({ files }).list();
      return found.map(({ path, parts }) => [path, parts.map(({ file }) => file.size)]);
    }""")
    assert found == [["cells (2).ome.tif", [2]], ["cells.ome.tif", [1]]]


def test_oif_is_uploaded_with_its_folder(fake: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    stack = np.arange(3 * 16 * 20, dtype=np.uint16).reshape(1, 1, 3, 16, 20)
    files = make_files(stack, make_settings(stack))
    contents = {f"day 2/{name}": content for name, content in files.items()}
    contents |= {"lone.oif": files["cell.oif"], "lost.oif.files/s_Z001.tif": files["cell.oif.files/s_Z001.tif"]}
    for name, content in contents.items():
        (tmp_path / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "scans" / name).write_bytes(content)
    page = open_page(fake)
    page.locator("#folder").set_input_files(tmp_path / "scans")

    expect(find_row(page, "cell.oif")).to_contain_text("20 × 16 × 3 voxels · 0.25 × 0.5 × 1.5 µm · axes ZYX")
    left_out = page.locator(".batch-skipped li")
    expect(left_out).to_have_count(2)
    expect(left_out.filter(has_text="lone.oif")).to_contain_text("the folder lone.oif.files is missing")
    expect(left_out.filter(has_text="lost.oif")).to_contain_text("the file lost.oif is missing")


def check_files(page: Page, nuclei: LiveServer, contents: dict[str, bytes]) -> None:
    """Check the archive, which also contains the table and the report, against the results of `/segment`."""
    with page.expect_download() as download_info:
        page.get_by_role("button", name="ZIP").click()
    assert download_info.value.suggested_filename == "embryos_labels.zip"
    with zipfile.ZipFile(download_info.value.path()) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == 8
        labels = tifffile.imread(io.BytesIO(archive.read("labels/day 2/b_labels.ome.tif")))
        table = list(csv.DictReader(io.StringIO(archive.read("objects.csv").decode())))
        report = archive.read("report.html").decode()
    response = nuclei.segment(contents["day 2/b.tif"], diameter="none")
    assert np.array_equal(labels, tifffile.imread(io.BytesIO(response.content)))
    rows = [row for row in table if row["stack"] == "day 2/b.tif"]
    assert [int(row["label"]) for row in rows] == list(range(1, int(labels.max()) + 1))
    assert [int(row["num_pixels"]) for row in rows] == np.bincount(labels.ravel())[1:].tolist()
    assert {row["unit"] for row in table} == {"um"}
    stacks = {"a.tif", "day 2/b.tif", "c.ome.zarr", "no voxel size.tif", "channels.tif", "unnamed axis.tif"}
    assert {row["stack"] for row in table} == stacks
    # Stacks with one channel and with several channels have different columns.
    assert [row["intensity_mean"] == "" for row in table] == [row["intensity_mean-1"] != "" for row in table]
    assert "6 of 8 stacks" in report
    assert all(name in report for name in contents if not name.startswith("movie"))


def check_return_to_batch(page: Page) -> None:
    """Open a result in the viewer, reload the page, and go back to the batch."""
    row = find_row(page, "b.tif")
    objects = row.locator("strong").filter(has_text="objects").text_content()
    row.get_by_role("button", name="Open").click()
    expect(page.locator("#summary")).to_contain_text(str(objects))
    page.get_by_label("Smallest Volume, µm³", exact=True).fill("20")
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_contain_text(f" of {objects}")
    shown_count = int(page.locator("#summary").inner_text().split()[0])
    page.reload()
    page.get_by_role("link", name="Back to the batch").click()
    expect(row).to_contain_text(f"{shown_count} of {objects}")
    with page.expect_download() as download_info:
        page.get_by_role("button", name="CSV").click()
    table = csv.DictReader(io.StringIO(download_info.value.path().read_text()))
    assert sum(line["stack"] == "day 2/b.tif" for line in table) == shown_count
    expect(page.locator("#batch")).to_contain_text("The filters that you set for day 2/b.tif were applied.")
    row.get_by_role("button", name="Open").click()
    settings = page.locator("#settings")
    settings.get_by_text("More settings").click()
    settings.get_by_label("Minimum object size").fill("100000")
    settings.get_by_label("Minimum object size").press("Tab")
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("No objects")
    page.get_by_role("link", name="Back to the batch").click()
    row.get_by_role("button", name="Use the newer result").click()
    expect(row).to_contain_text("Own settings: Minimum object size: 100000")
    expect(row.locator("strong").filter(has_text="objects")).to_have_text("0 objects")
    page.get_by_role("button", name="New stack").click()
    expect(page.locator(".batches")).to_contain_text("6 of 8 stacks segmented")
    check_accessibility(page)
    # Removing a recent stack keeps the other lists.
    expect(page.locator("button.recent-job").first).to_contain_text("Minimum object size: 100000")
    recent_count = page.locator(".recent-job").count()
    page.get_by_role("button", name="Remove b.tif").first.click()
    expect(page.locator(".recent-job")).to_have_count(recent_count - 1)
    expect(page.locator(".batches")).to_contain_text("6 of 8 stacks segmented")


def test_stacks_are_cancelled_and_tried_again_without_the_others(fake: LiveServer, open_page: OpenPage) -> None:
    segmenter = fake.fake
    segmenter.gate.clear()
    page = open_page(fake)
    drop(page, {f"{number}.tif": STACK for number in range(9)})
    page.get_by_role("button", name="Segment 9 stacks").click()
    # The queue of the service has places for other users.
    expect(page.locator("li[data-phase=requested]")).to_have_count(1)
    page.get_by_role("button", name="Cancel: 0.tif").click()
    expect(find_row(page, "0.tif")).to_have_attribute("data-phase", "cancelled")
    page.get_by_role("button", name="Cancel: 8.tif").click()
    expect(page.locator("li[data-phase=cancelled]")).to_have_count(2)

    page.context.set_offline(True)
    expect(page.locator("#connection")).to_contain_text("has not responded since", timeout=5000)
    expect(find_row(page, "1.tif")).to_contain_text("before the connection was lost")
    page.get_by_role("button", name="Cancel: 1.tif", exact=True).click()
    expect(find_row(page, "1.tif")).to_have_attribute("data-phase", "cancelling")
    page.context.set_offline(False)
    expect(page.locator("#connection")).to_be_hidden()
    expect(find_row(page, "1.tif")).to_have_attribute("data-phase", "cancelled")

    segmenter.gate.set()
    expect(page.locator("li[data-phase=done]")).to_have_count(6)
    page.get_by_role("button", name="Try again: 8.tif").click()
    expect(find_row(page, "8.tif")).to_have_attribute("data-phase", "done")
    segmenter.gate.clear()
    page.get_by_text("More settings").click()
    page.get_by_label("Window overlap").fill("0.5")
    page.get_by_label("Window overlap").press("Tab")
    expect(find_row(page, "2.tif")).to_contain_text("Made with other settings")
    page.get_by_role("button", name="Segment 9 stacks again").click()
    expect(page.locator("li[data-phase=running]")).not_to_have_count(0)
    page.get_by_role("button", name="Cancel all").click()
    expect(page.locator("li[data-phase=cancelled]")).to_have_count(9)
    segmenter.gate.set()
    wait_until(lambda: not fake.runtime.devices.running_jobs, TIMEOUT_SECONDS)


def test_reloaded_batch_continues_with_files_that_are_chosen_again(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/stacks", hold)
    drop(page, {"a.tif": STACK, "b.tif": STACK, "c.tif": STACK})
    wait_until_held(page, held)
    held[0].continue_()
    expect(page.locator("li[data-phase=ready]")).to_have_count(1)
    page.wait_for_timeout(500)
    page.on("dialog", lambda dialog: dialog.accept())
    page.unroute("**/stacks")
    page.reload()
    expect(page.locator("li[data-phase=missing]")).to_have_count(2)
    page.get_by_label("More files for this batch").set_input_files(
        [{"name": name, "mimeType": "image/tiff", "buffer": STACK} for name in ("b.tif", "c.tif", "d.tif")]
    )
    page.get_by_role("button", name="Segment 4 stacks").click()
    expect(page.locator("li[data-phase=done]")).to_have_count(4)
    jobs = fake.client.get("/jobs?limit=4").json()["jobs"]
    assert sorted(job["name"] for job in jobs) == ["a.tif", "b.tif", "c.tif", "d.tif"]
    for job in jobs:
        fake.client.delete(f"/jobs/{job['id']}")
        if job["name"] == "b.tif":
            fake.client.delete(f"/stacks/{job['parameters']['stack']}")
    page.reload()
    expect(page.locator("li[data-phase=gone]")).to_have_count(4)
    for name in ("a.tif", "b.tif"):
        page.get_by_role("button", name=f"Try again: {name}").click()
    expect(find_row(page, "a.tif")).to_have_attribute("data-phase", "done")
    expect(find_row(page, "b.tif")).to_have_attribute("data-phase", "missing")
    file = {"name": "b.tif", "mimeType": "image/tiff", "buffer": STACK}
    page.get_by_label("More files for this batch").set_input_files([file])
    expect(find_row(page, "b.tif")).to_have_attribute("data-phase", "done")


def wait_until_held(page: Page, routes: list[Route]) -> None:
    while not routes:
        page.wait_for_timeout(20)


def test_folder_on_the_server_is_segmented_without_an_upload(
    bands_repository: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    for name in ("a.tif", "b.tif"):
        (tmp_path / "scans" / "day 1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "scans" / "day 1" / name).write_bytes(STACK)
    (tmp_path / "scans" / "day 1" / "truncated.tif").write_bytes(STACK[:100])
    (tmp_path / "results").mkdir()
    references = {
        "inputs": {"scans": {"folder": tmp_path / "scans"}},
        "outputs": {"results": {"folder": tmp_path / "results"}},
    }
    settings = eager_settings(bands_repository, models={"load": "all"}, references=references)
    with serve(settings, load=FakeSegmenter) as live:  # type: ignore[arg-type]
        page = open_page(live)
        page.get_by_role("button", name="Folder on the server").click()
        segment = page.get_by_role("button", name="Segment the folder")
        page.get_by_label("Folder with the stacks: path").fill("day 2")
        page.get_by_label("Folder for the results: path").fill("day 1")
        segment.click()
        expect(page.locator("#problem")).to_contain_text("day 2 does not exist")
        page.get_by_label("Folder with the stacks: path").fill("day 1")
        check_accessibility(page)
        segment.click()
        expect(page.get_by_role("status").first).to_have_text("Done · scans/day 1/ · 2 of 3 stacks segmented")
        expect(page.locator("tbody tr")).to_have_count(3)
        expect(page.locator("tbody tr").filter(has_text="truncated.tif")).to_contain_text("truncated or damaged")
        check_accessibility(page)
        page.get_by_role("button", name="New stack").click()
        page.locator(".recent-job").click()
        expect(page.locator("tbody tr")).to_have_count(3)
    assert (tmp_path / "results" / "day 1" / "report.html").is_file()


def test_unnamed_axes_of_three_dimensions_have_sizes(fake: LiveServer, open_page: OpenPage) -> None:
    def fail(route: Route) -> None:
        detail = "The axes of the file are ambiguous: its dimensions are 5 x 16 x 24 (QYX)."
        problem = {"type": "urn:stackseg:problem:ambiguous-axes", "detail": detail, "suggested": {"axes": "ZYX"}}
        route.fulfill(status=422, content_type="application/problem+json", body=json.dumps(problem))

    page = open_page(fake)
    page.route("**/inspect?*", fail)
    stack = as_tiff(np.full((5, 16, 24), 200, np.uint8))
    page.locator("#file").set_input_files([{"name": f"{n}.tif", "mimeType": "", "buffer": stack} for n in "ab"])
    page.get_by_role("button", name="Settings: a.tif").click()
    expect(page.locator(".axes-options li").first).to_contain_text("5 planes, 16 rows, 24 columns")
