"""Tests of correcting labels in the web UI, in a real browser."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
from browsing import (
    OpenPage,
    central_voxel,
    check_accessibility,
    download,
    drag,
    export_labels,
    find_crosshair,
    go_to,
    open_correct_tab,
    read_measurement,
)
from live import LabelTiff, LiveServer, as_tiff
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect
from scipy import ndimage

from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume
from service.inference.measurements import measure_objects

CHECK_PROPERTIES = (Path(__file__).parent / "label_properties.js").read_text(encoding="utf-8")
MEASURE_SPEED = read_measurement("label_speed.js")
# Maximum duration of one correction.
MAX_CORRECTION_MILLISECONDS = 100

# Shows the result subsampled by two, as the page does for large results. Returns the content of the views before,
# during and after correcting the labels, and the text of the panel after a subsampled image has been opened.
CORRECT_SUBSAMPLED = """async ([job, stack]) => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { CorrectView } = await import("/page/correct/correct_view.js");
  const { fetchVolume } = await import("/page/volumes/planes.js");
  const { signal } = new AbortController(), fullShape = [24, 80, 80], step = [1, 2, 2], onblock = () => {};
  const fetchSubsampled = (url, step) => fetchVolume({ url, parameters: {}, fullShape }, signal, onblock, step);
  const viewer = new Viewer(document.getElementById("viewer"));
  const image = await fetchSubsampled(`stacks/${stack}/planes`, step);
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.setLabels(await fetchSubsampled(`jobs/${job}/planes`, step));
  viewer.fetchFullVolume = () => fetchSubsampled(`stacks/${stack}/planes`, [1, 1, 1]);
  viewer.scene.set({ position: [5, 10, 12] });
  const describeViews = () => {
    const { position, image, labels } = viewer.scene.state;
    return { position, step: image.step, labels: labels.shape };
  };
  const { ResultLabels } = await import("/page/correct/label_sources.js");
  const labels = new ResultLabels({ job: { id: job, model: "nuclei/1" }, stack }, null);
  const view = new CorrectView(labels, "", viewer, 0, {}, signal);
  const before = describeViews();
  await view.enter();
  const during = describeViews(), voxelSize = view.mode.editor.voxelSize;
  view.leave();
  const after = describeViews();
  await view.enter();
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.drawNow();
  return { before, during, after, voxelSize, pausedText: view.root.textContent };
}"""

REMEMBER_JOB = 'async entry => (await import("/page/stack/recent_jobs.js")).rememberJob(entry)'


class Result(NamedTuple):
    """A finished job for a part of the sample.

    stack   id of the stack
    job     id of the job
    labels  labels [24, 80, 80]
    volume  image of the stack
    """

    live: LiveServer
    stack: str
    job: str
    labels: NDArray[np.uint16]
    volume: Volume


@pytest.fixture(scope="module")
def result(nuclei: LiveServer) -> Result:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:140, 40:120]
    stack = nuclei.post("/stacks", as_tiff(sample)).json()["id"]
    job = nuclei.run(b"", stack=stack, diameter="none", measurements="zip")
    labels = np.load(io.BytesIO(nuclei.result(job, Accept="application/x-npy").content))
    return Result(nuclei, stack, job["id"], labels, Volume.from_array(sample[None]))


def open_result(result: Result, open_page: OpenPage) -> Page:
    page = open_page(result.live, accept_downloads=True)
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    page.goto(f"/#job={result.job}")
    expect(page.locator("#summary")).to_contain_text("objects, median diameter")
    return page


def open_corrections(result: Result, open_page: OpenPage) -> Page:
    page = open_result(result, open_page)
    open_correct_tab(page)
    return page


def click_voxel(page: Page, voxel: tuple[int, int, int]) -> None:
    go_to(page, voxel)
    page.mouse.click(*find_crosshair(page))


def sort_ids_by_size(labels: NDArray[Any]) -> list[int]:
    """Return the ids of all objects, the largest object first."""
    return [int(label) for label in np.argsort(np.bincount(labels.ravel())[1:])[::-1] + 1]


def read_table(content: bytes) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a table of objects by name, with booleans as 0 and 1."""
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert {row.pop("unit") for row in rows} == {"um"}
    numbers = {"True": 1.0, "False": 0.0}
    return {name: np.array([float(numbers.get(row[name], row[name])) for row in rows]) for name in rows[0]}


def test_corrections_are_exported_and_survive_a_reload(result: Result, open_page: OpenPage) -> None:
    page, labels = open_corrections(result, open_page), result.labels
    check_accessibility(page)
    kept_id, merged_id, deleted_id, cut_id, *_ = sort_ids_by_size(labels)
    hint = page.locator(".hint")
    page.get_by_role("button", name="Merge").click()
    click_voxel(page, central_voxel(labels, kept_id))
    click_voxel(page, central_voxel(labels, merged_id))
    expect(hint).to_contain_text(f"Merged objects {kept_id} and {merged_id}")
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, deleted_id))
    expect(page.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    expect(page.locator("#summary")).to_have_text(f"{len(sort_ids_by_size(labels)) - 2} objects. Includes corrections.")
    expected = np.where(labels == merged_id, kept_id, np.where(labels == deleted_id, 0, labels))
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Undo").click()
    expect(hint).to_contain_text("Undid the deletion")
    assert np.array_equal(export_labels(page), np.where(labels == merged_id, kept_id, labels))
    page.keyboard.press("Control+Shift+Z")
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Cut").click()
    z, y, x = central_voxel(labels, cut_id)
    go_to(page, (z, y, x))
    cross_x, cross_y = find_crosshair(page)
    drag(page, [(cross_x - 40, cross_y + 1), (cross_x + 40, cross_y + 1)])
    expect(hint).to_contain_text(f"Cut object {cut_id}")
    parts = export_labels(page)
    new_id = int(labels.max()) + 1
    assert np.array_equal(parts == new_id, (labels == cut_id) & (parts == new_id))
    assert np.array_equal(np.where(parts == new_id, cut_id, parts), expected)
    assert {bool(np.ptp(np.sign(np.argwhere(parts == part_id)[:, 1] - y - 0.1))) for part_id in (cut_id, new_id)} == {
        False
    }

    measured_table = read_table(download(page, "Table"))
    expected_table = measure_objects(Segmentation(parts, "labels", VoxelSize(0.5, 0.2, 0.2)), result.volume)
    for name, values in measured_table.items():
        assert np.allclose(values, expected_table[name], rtol=1e-8), name
    assert measured_table.keys() == expected_table.keys() - {"unit"}
    page.get_by_role("tab", name="Objects").click()
    object_count = int(np.count_nonzero(np.unique(parts)))
    expect(page.locator("#summary")).to_contain_text(re.compile(rf"^{object_count} objects, .*Includes corrections\.$"))
    volume = measured_table["area"][measured_table["label"].tolist().index(new_id)]
    page.locator(".scroller").evaluate("scroller => { scroller.scrollTop = scroller.scrollHeight }")
    expect(page.locator(f"tr[data-label='{new_id}']")).to_contain_text(f"{volume:.3g}")
    page.get_by_role("tab", name="Export").click()
    expect(page.get_by_role("tabpanel", name="Export")).to_contain_text("with 3 corrections")

    page.reload()
    expect(page.get_by_role("tab", name="Correct")).to_contain_text("3 corrections")
    expect(page.locator("#summary")).to_contain_text("Includes corrections.")
    open_correct_tab(page)
    expect(hint).to_contain_text("3 saved corrections were restored")
    assert np.array_equal(export_labels(page), parts)
    file = LabelTiff(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    assert np.array_equal(file.pixels, parts)

    other_page = page.context.new_page()
    other_page.goto(page.url)
    other_page.get_by_role("tab", name="Correct").click()
    expect(other_page.locator(".correct")).to_contain_text("being edited in another tab")
    other_page.get_by_role("button", name="Continue here").click()
    expect(other_page.locator(".hint")).to_contain_text("3 saved corrections were restored")
    expect(page.locator(".correct")).to_contain_text("You are now editing these labels in another tab")
    other_page.get_by_role("button", name="Undo").click()
    expect(other_page.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    page.get_by_role("button", name="Continue here").click()
    expect(hint).to_contain_text("2 saved corrections were restored")
    expect(other_page.locator(".correct")).to_contain_text("You are now editing these labels in another tab")
    other_page.close()
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Discard all corrections").click()
    assert np.array_equal(export_labels(page), labels)
    page.get_by_role("tab", name="Objects").click()
    expect(page.locator("#summary")).not_to_contain_text("Includes corrections.")
    page.locator("tr[data-label]").first.click()
    expect(page.locator(".readout")).to_contain_text("object")


def test_objects_are_outlined_split_and_painted(result: Result, open_page: OpenPage) -> None:
    page, labels = open_corrections(result, open_page), result.labels
    hint = page.locator(".hint")
    new_id = int(labels.max()) + 1
    page.get_by_role("button", name="Outline").click()
    free_voxel = central_voxel(labels == 0, 1)
    for plane in (8, 14):
        go_to(page, (plane, free_voxel[1], free_voxel[2]))
        cross_x, cross_y = find_crosshair(page)
        angles = np.linspace(0, 6.2, 40)
        drag(page, [(cross_x + 60 * np.cos(angle), cross_y + 60 * np.sin(angle)) for angle in angles])
        expect(hint).to_contain_text("Go to another plane")
    outlined_labels = export_labels(page)
    assert np.array_equal(np.where(outlined_labels == new_id, 0, outlined_labels), labels)
    assert [bool((plane == new_id).any()) for plane in outlined_labels[7:16]] == [False, *[True] * 7, False]
    is_near = np.zeros_like(labels[0], bool)
    is_near[free_voxel[1] - 4 : free_voxel[1] + 4, free_voxel[2] - 4 : free_voxel[2] + 4] = True
    assert ((outlined_labels[8:15] == new_id) | (labels[8:15] > 0))[:, is_near].all()

    page.get_by_role("button", name="Split").click()
    object_to_split = sort_ids_by_size(labels)[0]
    object_voxels = np.argwhere(outlined_labels == object_to_split)
    plane = object_voxels[object_voxels[:, 0] == central_voxel(outlined_labels, object_to_split)[0]]
    for seed in (plane[np.argmin(plane[:, 2])], plane[np.argmax(plane[:, 2])]):
        click_voxel(page, (int(seed[0]), int(seed[1]), int(seed[2])))
    expect(hint).to_contain_text("Split object")
    split_labels = export_labels(page)
    assert np.array_equal(np.where(split_labels == new_id + 1, object_to_split, split_labels), outlined_labels)
    assert (split_labels == new_id + 1).any()

    page.get_by_role("button", name="Brush").click()
    expect(page.get_by_label("Brush size")).to_be_visible()
    z, y, x = central_voxel(split_labels, new_id)
    go_to(page, (z, y, x))
    cross_x, cross_y = find_crosshair(page)
    drag(page, [(cross_x, cross_y), (cross_x + 60, cross_y), (cross_x + 120, cross_y)])
    expect(page.locator(".correct")).to_contain_text("1 painted")
    painted_labels = export_labels(page)
    assert set(np.unique(painted_labels[painted_labels != split_labels])) == {new_id}
    assert not (split_labels[painted_labels != split_labels]).any()
    selected = page.locator(".selected-object")
    expect(selected).to_have_text(re.compile(f"Object {new_id} selected: .* voxels, .* µm³"))

    free_voxel = central_voxel(ndimage.binary_erosion(painted_labels == 0, np.ones((3, 9, 9))), 1)
    newest_id = int(painted_labels.max()) + 1
    click_voxel(page, free_voxel)
    expect(hint).to_contain_text(f"Created object {newest_id}.")
    expect(selected).to_contain_text(f"Object {newest_id} selected")
    free_voxel = central_voxel(ndimage.binary_erosion(export_labels(page) == 0, np.ones((3, 9, 9))), 1)
    page.get_by_label("Add to the selected object").check()
    click_voxel(page, free_voxel)
    expect(hint).to_contain_text(f"Extended object {newest_id}.")
    extended_labels = export_labels(page)
    assert set(np.unique(extended_labels[extended_labels != painted_labels])) == {newest_id}
    assert extended_labels[free_voxel] == newest_id
    check_accessibility(page)


def test_corrected_labels_are_saved_as_an_annotated_stack(result: Result, open_page: OpenPage) -> None:
    page, labels = open_corrections(result, open_page), result.labels
    deleted_id = sort_ids_by_size(labels)[0]
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, deleted_id))
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Improve the model").click()
    expect(dialog.get_by_role("heading")).to_have_text("Save as annotated stack")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Save as annotated stack").click()
    check_accessibility(page)
    dialog.get_by_label("Name").fill("Zellkörper 1")
    expect(dialog).to_contain_text("Every object is labeled in the whole stack")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_label("A box").check()
    for label, value in (("Planes, last", "20"), ("Rows, first", "11")):
        page.get_by_label(label).fill(value)
        page.get_by_label(label).blur()
    page.get_by_role("button", name="Save as annotated stack").click()
    expect(dialog).to_contain_text("Every object is labeled in the box x 1 to 80, y 11 to 80, z 1 to 20")
    dialog.get_by_label("Name").fill("Zellkörper 1")
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator(".hint")).to_contain_text("Saved as Zellkörper 1")
    page.get_by_role("button", name="Improve the model").click()
    expect(dialog.get_by_role("heading")).to_have_text("Improve a model")
    expect(dialog.get_by_label("Zellkörper 1")).to_be_checked()
    dialog.get_by_role("button", name="Cancel").click()
    (annotation,) = result.live.client.get("/annotations").json()["annotations"]
    assert (annotation["name"], annotation["changes"], annotation["job"]) == ("Zellkörper 1", 1, result.job)
    assert annotation["region"] == "0:20,10:80,0:80"
    file = LabelTiff(result.live.client.get(f"/annotations/{annotation['id']}/labels").content)
    assert np.array_equal(file.pixels, np.where(labels == deleted_id, 0, labels))
    page.get_by_role("button", name="New stack").click()
    annotated = page.get_by_role("region", name="Annotated stacks")
    expect(annotated).to_contain_text("1 correction")
    check_accessibility(page)
    page.on("dialog", lambda prompt: prompt.accept())
    annotated.get_by_role("button", name="Delete Zellkörper 1").click()
    expect(annotated).to_be_hidden()
    assert result.live.client.get("/annotations").json()["annotations"] == []


def test_annotated_stack_from_another_browser_is_shown(result: Result, open_page: OpenPage) -> None:
    page, labels = open_corrections(result, open_page), result.labels
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, sort_ids_by_size(labels)[0]))
    page.get_by_role("button", name="Save as annotated stack").click()
    page.get_by_role("dialog").get_by_label("Name").fill("by Ada")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator(".correct")).to_contain_text("Saved as annotated stack by Ada")
    other_page = open_corrections(result, open_page)
    expect(other_page.locator(".correct")).to_contain_text(
        "This result was also corrected in another browser and saved as annotated stack by Ada"
    )
    check_accessibility(other_page)
    page.reload()
    open_correct_tab(page)
    expect(page.locator(".correct")).to_contain_text("Saved as annotated stack by Ada")
    expect(page.locator(".correct")).not_to_contain_text("another browser", use_inner_text=True)
    (annotation,) = result.live.client.get("/annotations").json()["annotations"]
    result.live.client.delete(f"/annotations/{annotation['id']}")


def test_corrections_remain_after_their_result_is_deleted(result: Result, open_page: OpenPage) -> None:
    job = result.live.run(b"", stack=result.stack, diameter="none", measurements="zip")["id"]
    page, labels = open_corrections(result._replace(job=job), open_page), result.labels
    deleted_ids = sort_ids_by_size(labels)[:2]
    page.get_by_role("button", name="Delete", exact=True).click()
    for number, label in enumerate(deleted_ids, 1):
        click_voxel(page, central_voxel(labels, label))
        expect(page.locator(".correct")).to_contain_text(f"{number} deleted")
    result.live.client.delete(f"/jobs/{job}")
    page.get_by_role("button", name="Save as annotated stack").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_contain_text("Save the labels as a file instead.")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="New stack").click()
    entry = page.locator(".recent-job")
    expect(entry).to_contain_text("objects, corrected · 2 corrections")
    entry.click()
    expect(dialog).to_contain_text("The service no longer stores this result")
    check_accessibility(page)
    assert np.array_equal(export_labels(page), np.where(np.isin(labels, deleted_ids), 0, labels))
    file = LabelTiff(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    page.on("dialog", lambda prompt: prompt.accept())
    dialog.get_by_role("button", name="Discard the corrections").click()
    expect(entry).to_have_count(0)


def test_results_are_compared_with_and_without_corrections(result: Result, open_page: OpenPage) -> None:
    page, labels = open_result(result, open_page), result.labels
    other_job = result.live.run(b"", stack=result.stack, diameter="none")["id"]
    page.evaluate(REMEMBER_JOB, {"job": other_job, "stack": result.stack, "objects": len(sort_ids_by_size(labels))})
    open_correct_tab(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, sort_ids_by_size(labels)[0]))
    expect(page.locator(".correct")).to_contain_text("1 deleted")
    results = page.get_by_role("group", name="Results of this stack")
    current_result, other_result = results.locator("[aria-current]"), results.locator("button:not([aria-current])")
    expect(current_result).to_contain_text(f" {len(sort_ids_by_size(labels)) - 1} objects, corrected")
    expect(other_result).to_have_text(f"{len(sort_ids_by_size(labels))} objects")
    page.get_by_role("button", name="Undo").click()
    expect(current_result).to_have_text(re.compile(f" {len(sort_ids_by_size(labels))} objects$"))
    page.get_by_role("button", name="Redo").click()
    expect(current_result).to_contain_text("objects, corrected")
    page.goto(f"/#compare={other_job},{result.job}")
    left, right = page.locator(".side-by-side").first, page.locator(".side-by-side").last
    footer = page.locator("#compare footer")
    object_count = len(sort_ids_by_size(labels))
    expect(footer).to_contain_text(f"{object_count - 1} objects in both (overlap above 50%), 1 only in the first")
    expect(right).to_contain_text(f"{object_count - 1} objects")
    tops = page.locator(".side-by-side .views").evaluate_all(
        "views => views.map(view => view.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    right.get_by_label("With 1 correction").uncheck()
    expect(footer).to_contain_text("0 only in the first, 0 only in the second")
    for side in (left, right):
        expect(side).to_contain_text(f"{object_count} objects")
    check_accessibility(page)


def test_all_tools_work_with_the_keyboard(result: Result, open_page: OpenPage) -> None:
    page, labels = open_result(result, open_page), result.labels
    page.get_by_role("tab", name="Objects").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Merge")).to_be_visible()
    stage = page.locator(".view[data-axis=z] .stage")
    first_id, second_id, *_ = sort_ids_by_size(labels)

    def press_at(voxel: tuple[int, int, int], *keys: str) -> None:
        go_to(page, voxel)
        stage.focus()
        for key in keys:
            page.keyboard.press(key)

    hint = page.locator(".hint")
    press_at(central_voxel(labels, first_id), "m", "Enter")
    press_at(central_voxel(labels, second_id), "Enter")
    expect(hint).to_contain_text("Merged objects")
    page.keyboard.press("Control+z")
    press_at(central_voxel(labels, first_id), "v", "Enter", "Delete")
    expect(hint).to_contain_text(f"Deleted object {first_id}")
    assert np.array_equal(export_labels(page), np.where(labels == first_id, 0, labels))
    page.keyboard.press("Control+z")
    z, y, x = central_voxel(labels, first_id)
    press_at((z, y, x), "x", "Shift+ArrowLeft", "Enter", "Shift+ArrowRight", "Shift+ArrowRight", "Enter")
    expect(hint).to_contain_text(f"Cut object {first_id}")
    page.keyboard.press("Control+z")
    is_empty_corner = sliding_window_view(labels == 0, (10, 10), (1, 2)).all((3, 4))  # type: ignore[call-overload]
    corner = tuple(int(index) for index in np.argwhere(is_empty_corner)[0])
    press_at(corner, "n", "a", "Enter", *["Shift+ArrowRight"] * 9, "Enter", *["Shift+ArrowDown"] * 9, "Enter", "c")
    expect(page.locator(".correct")).to_contain_text("1 outlined")
    press_at((z, y, x), "e", "[", "[", "Enter")
    expect(page.locator(".correct")).to_contain_text("1 erased")
    erased_labels = export_labels(page)
    assert erased_labels[z, y, x] == 0
    assert np.array_equal(
        erased_labels[labels != first_id][labels[labels != first_id] > 0],
        labels[labels != first_id][labels[labels != first_id] > 0],
    )


def test_random_corrections_are_undone_redone_and_restored(module_page: Page) -> None:
    for seed in range(3):
        outcome = module_page.evaluate(CHECK_PROPERTIES, [seed, 60])
        assert outcome["failures"] == [], seed
        assert outcome["kinds"] == ["add", "delete", "erase", "fill", "merge", "paint", "split"], seed


def test_corrections_of_a_large_stack_are_immediate(module_page: Page) -> None:
    times = module_page.evaluate(MEASURE_SPEED)
    print({name: f"{milliseconds:.1f} ms" for name, milliseconds in times.items()})
    assert max(times.values()) < MAX_CORRECTION_MILLISECONDS


def test_subsampled_result_is_corrected_at_full_resolution(result: Result, open_page: OpenPage) -> None:
    outcome = open_page(result.live).evaluate(CORRECT_SUBSAMPLED, [result.job, result.stack])
    assert outcome["before"] == outcome["after"] == {"position": [5, 10, 12], "step": [1, 2, 2], "labels": [24, 40, 40]}
    assert outcome["during"] == {"position": [5, 20, 24], "step": [1, 1, 1], "labels": [24, 80, 80]}
    assert outcome["voxelSize"] == [0.5, 0.2, 0.2]
    assert outcome["pausedText"] == "The image was reloaded. Your changes are saved.Continue"


def test_labels_too_large_for_the_browser_are_explained(module_page: Page) -> None:
    text = module_page.evaluate(
        """async () => {
          const { CorrectView } = await import("/page/correct/correct_view.js");
          const fullShape = [400, 1998, 1998];
          const small = { data: new Uint16Array(8), shape: [2, 2, 2], step: [200, 999, 999], fullShape };
          const viewer = { scene: { state: { image: small, labels: small } } };
          const { ResultLabels } = await import("/page/correct/label_sources.js");
          const labels = new ResultLabels({ job: { id: "0" }, stack: "" }, null);
          const view = new CorrectView(labels, "", viewer, 0, {}, new AbortController().signal);
          await view.enter();
          return view.root.textContent;
        }"""
    )
    assert "3.19 GB" in text
    assert "Use a smaller part of the stack" in text
