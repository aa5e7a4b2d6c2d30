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
from browsing import OpenPage, central_voxel, check_accessibility
from live import LabelTiff, LiveServer, as_tiff
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect
from scipy import ndimage

from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume
from service.inference.measurements import measure

CHECK_PROPERTIES = (Path(__file__).parent / "label_properties.js").read_text(encoding="utf-8")
MEASURE_SPEED = (Path(__file__).parent / "label_speed.js").read_text(encoding="utf-8")
# Limit for one correction.
MAX_MILLISECONDS = 100

# Shows the result subsampled by two, as large results are. Returns what the views show before, while and after the
# labels are corrected, and the text of the panel after a subsampled image was opened.
CORRECT_SUBSAMPLED = """async ([job, stack]) => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { CorrectView } = await import("/page/correct/correct_view.js");
  const { fetchVolume } = await import("/page/volumes/planes.js");
  const { signal } = new AbortController(), fullShape = [24, 80, 80], step = [1, 2, 2], onblock = () => {};
  const fetchStep = (address, step) => fetchVolume({ address, parameters: {}, fullShape }, signal, onblock, step);
  const viewer = new Viewer(document.getElementById("viewer"));
  const image = await fetchStep(`stacks/${stack}/planes`, step);
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.setLabels(await fetchStep(`jobs/${job}/planes`, step));
  viewer.fetchFullVolume = () => fetchStep(`stacks/${stack}/planes`, [1, 1, 1]);
  viewer.scene.set({ position: [5, 10, 12] });
  const describe = () => {
    const { position, image, labels } = viewer.scene.state;
    return { position, step: image.step, labels: labels.shape };
  };
  const view = new CorrectView({ job: { id: job, model: "nuclei/1" }, stack, name: "" }, viewer, 0, {}, signal);
  const before = describe();
  await view.enter();
  const during = describe(), voxel = view.mode.editor.voxel;
  view.leave();
  const after = describe();
  await view.enter();
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.drawNow();
  return { before, during, after, voxel, paused: view.root.textContent };
}"""

REMEMBER_JOB = 'async entry => (await import("/page/stack/recent_jobs.js")).rememberJob(entry)'


class Result(NamedTuple):
    """A finished job on a part of the sample.

    stack   id of the stack
    job     id of the job
    labels  [24, 80, 80]
    volume  the image
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
    job = nuclei.run(b"", stack=stack, measurements="zip")
    labels = np.load(io.BytesIO(nuclei.result(job, Accept="application/x-npy").content))
    return Result(nuclei, stack, job["id"], labels, Volume.from_array(sample[None]))


def open_result(result: Result, open_page: OpenPage) -> Page:
    page = open_page(result.live, accept_downloads=True)
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    page.goto(f"/#job={result.job}")
    expect(page.locator("#summary")).to_contain_text("objects, median diameter")
    return page


def open_correct_tab(page: Page) -> None:
    page.get_by_role("tab", name="Correct").click()
    expect(page.get_by_role("button", name="Merge")).to_be_visible()


def correct(result: Result, open_page: OpenPage) -> Page:
    page = open_result(result, open_page)
    open_correct_tab(page)
    return page


def go_to(page: Page, voxel: tuple[int, int, int]) -> None:
    for axis, position in zip("zyx", voxel, strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(position))


def crosshair_position(page: Page) -> tuple[float, float]:
    """Return the screen position of the crosshair in the XY view."""
    view = page.locator(".view[data-axis=z]")
    vertical, horizontal = view.locator(".cross.vertical"), view.locator(".cross.horizontal")
    # The crosshair moves in the next frame.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    column, row = vertical.bounding_box(), horizontal.bounding_box()
    assert column is not None
    assert row is not None
    return column["x"] + column["width"] / 2, row["y"] + row["height"] / 2


def click_voxel(page: Page, voxel: tuple[int, int, int]) -> None:
    go_to(page, voxel)
    page.mouse.click(*crosshair_position(page))


def drag(page: Page, path: list[tuple[float, float]]) -> None:
    page.mouse.move(*path[0])
    page.mouse.down()
    for point in path[1:]:
        page.mouse.move(*point)
    page.mouse.up()


def ids_by_size(labels: NDArray[Any]) -> list[int]:
    """Return all ids, largest objects first."""
    return [int(label) for label in np.argsort(np.bincount(labels.ravel())[1:])[::-1] + 1]


def download(page: Page, button: str) -> bytes:
    with page.expect_download() as downloading:
        page.get_by_role("button", name=button, exact=True).click()
    return Path(downloading.value.path()).read_bytes()


def read_table(text: bytes) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a table of objects by name, with booleans as 0 and 1."""
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    assert {row.pop("unit") for row in rows} == {"um"}
    as_number = {"True": 1.0, "False": 0.0}
    return {name: np.array([float(as_number.get(row[name], row[name])) for row in rows]) for name in rows[0]}


def export_labels(page: Page) -> NDArray[Any]:
    labels: NDArray[Any] = np.load(io.BytesIO(download(page, "NumPy")))
    return labels


def test_corrections_are_exported_and_survive_a_reload(result: Result, open_page: OpenPage) -> None:
    page, labels = correct(result, open_page), result.labels
    check_accessibility(page)
    kept, merged, deleted, cut, *_ = ids_by_size(labels)
    hint = page.locator(".hint")
    page.get_by_role("button", name="Merge").click()
    click_voxel(page, central_voxel(labels, kept))
    click_voxel(page, central_voxel(labels, merged))
    expect(hint).to_contain_text(f"Merged objects {kept} and {merged}")
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, deleted))
    expect(page.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    expect(page.locator("#summary")).to_have_text(f"{len(ids_by_size(labels)) - 2} objects. Includes corrections.")
    expected = np.where(labels == merged, kept, np.where(labels == deleted, 0, labels))
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Undo").click()
    expect(hint).to_contain_text("Undone: deleted")
    assert np.array_equal(export_labels(page), np.where(labels == merged, kept, labels))
    page.keyboard.press("Control+Shift+Z")
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Cut").click()
    z, y, x = central_voxel(labels, cut)
    go_to(page, (z, y, x))
    across, down = crosshair_position(page)
    drag(page, [(across - 40, down + 1), (across + 40, down + 1)])
    expect(hint).to_contain_text(f"Cut object {cut}")
    parts = export_labels(page)
    new = int(labels.max()) + 1
    assert np.array_equal(parts == new, (labels == cut) & (parts == new))
    assert np.array_equal(np.where(parts == new, cut, parts), expected)
    assert {bool(np.ptp(np.sign(np.argwhere(parts == part)[:, 1] - y - 0.1))) for part in (cut, new)} == {False}

    measured = read_table(download(page, "Table"))
    expected_table = measure(Segmentation(parts, "labels", VoxelSize(0.5, 0.2, 0.2)), result.volume)
    for name, values in measured.items():
        assert np.allclose(values, expected_table[name], rtol=1e-8), name
    assert measured.keys() == expected_table.keys() - {"unit"}
    page.get_by_role("tab", name="Objects").click()
    objects = int(np.count_nonzero(np.unique(parts)))
    expect(page.locator("#summary")).to_contain_text(re.compile(rf"^{objects} objects, .*Includes corrections\.$"))
    volume = measured["area"][measured["label"].tolist().index(new)]
    page.locator(".scroller").evaluate("scroller => { scroller.scrollTop = scroller.scrollHeight }")
    expect(page.locator(f"tr[data-label='{new}']")).to_contain_text(f"{volume:.3g}")
    page.get_by_role("tab", name="Export").click()
    expect(page.get_by_role("tabpanel", name="Export")).to_contain_text("These files do not include your corrections")

    page.reload()
    expect(page.get_by_role("tab", name="Correct")).to_contain_text("3 corrections")
    expect(page.locator("#summary")).to_contain_text("Includes corrections.")
    open_correct_tab(page)
    expect(hint).to_contain_text("3 saved corrections were restored")
    assert np.array_equal(export_labels(page), parts)
    file = LabelTiff(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    assert np.array_equal(file.pixels, parts)

    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("tab", name="Correct").click()
    expect(other.locator(".correct")).to_contain_text("being corrected in another tab")
    other.get_by_role("button", name="Continue here").click()
    expect(other.locator(".hint")).to_contain_text("3 saved corrections were restored")
    expect(page.locator(".correct")).to_contain_text("You are now correcting this result in another tab")
    other.get_by_role("button", name="Undo").click()
    expect(other.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    page.get_by_role("button", name="Continue here").click()
    expect(hint).to_contain_text("2 saved corrections were restored")
    expect(other.locator(".correct")).to_contain_text("You are now correcting this result in another tab")
    other.close()
    assert np.array_equal(export_labels(page), expected)

    page.get_by_role("button", name="Discard all corrections").click()
    assert np.array_equal(export_labels(page), labels)
    page.get_by_role("tab", name="Objects").click()
    expect(page.locator("#summary")).not_to_contain_text("Includes corrections.")
    page.locator("tr[data-label]").first.click()
    expect(page.locator(".readout")).to_contain_text("object")


def test_objects_are_outlined_split_and_painted(result: Result, open_page: OpenPage) -> None:
    page, labels = correct(result, open_page), result.labels
    hint = page.locator(".hint")
    new = int(labels.max()) + 1
    page.get_by_role("button", name="Outline").click()
    free = central_voxel(labels == 0, 1)
    for plane in (8, 14):
        go_to(page, (plane, free[1], free[2]))
        across, down = crosshair_position(page)
        angles = np.linspace(0, 6.2, 40)
        drag(page, [(across + 60 * np.cos(angle), down + 60 * np.sin(angle)) for angle in angles])
        expect(hint).to_contain_text("Go to another plane")
    drawn = export_labels(page)
    assert np.array_equal(np.where(drawn == new, 0, drawn), labels)
    assert [bool((plane == new).any()) for plane in drawn[7:16]] == [False, *[True] * 7, False]
    within = np.zeros_like(labels[0], bool)
    within[free[1] - 4 : free[1] + 4, free[2] - 4 : free[2] + 4] = True
    assert ((drawn[8:15] == new) | (labels[8:15] > 0))[:, within].all()

    page.get_by_role("button", name="Split").click()
    object_to_split = ids_by_size(labels)[0]
    voxels = np.argwhere(drawn == object_to_split)
    plane = voxels[voxels[:, 0] == central_voxel(drawn, object_to_split)[0]]
    for place in (plane[np.argmin(plane[:, 2])], plane[np.argmax(plane[:, 2])]):
        click_voxel(page, (int(place[0]), int(place[1]), int(place[2])))
    expect(hint).to_contain_text("Split object")
    split = export_labels(page)
    assert np.array_equal(np.where(split == new + 1, object_to_split, split), drawn)
    assert (split == new + 1).any()

    page.get_by_role("button", name="Brush").click()
    expect(page.get_by_label("Brush size")).to_be_visible()
    z, y, x = central_voxel(split, new)
    go_to(page, (z, y, x))
    across, down = crosshair_position(page)
    drag(page, [(across, down), (across + 60, down), (across + 120, down)])
    expect(page.locator(".correct")).to_contain_text("1 painted")
    painted = export_labels(page)
    assert set(np.unique(painted[painted != split])) == {new}
    assert not (split[painted != split]).any()
    selected = page.locator(".selected-object")
    expect(selected).to_have_text(re.compile(f"Object {new} selected: .* voxels, .* µm³"))

    free = central_voxel(ndimage.binary_erosion(painted == 0, np.ones((3, 9, 9))), 1)
    newest = int(painted.max()) + 1
    click_voxel(page, free)
    expect(hint).to_contain_text(f"Created object {newest}.")
    expect(selected).to_contain_text(f"Object {newest} selected")
    free = central_voxel(ndimage.binary_erosion(export_labels(page) == 0, np.ones((3, 9, 9))), 1)
    page.get_by_label("Add to the selected object").check()
    click_voxel(page, free)
    expect(hint).to_contain_text(f"Extended object {newest}.")
    grown = export_labels(page)
    assert set(np.unique(grown[grown != painted])) == {newest}
    assert grown[free] == newest
    check_accessibility(page)


def test_corrected_labels_are_saved_as_an_annotated_stack(result: Result, open_page: OpenPage) -> None:
    page, labels = correct(result, open_page), result.labels
    deleted = ids_by_size(labels)[0]
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, deleted))
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Improve the model").click()
    expect(dialog.get_by_role("heading")).to_have_text("Save as annotated stack")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Save as annotated stack").click()
    check_accessibility(page)
    dialog.get_by_label("Name").fill("Zellkörper 1")
    dialog.get_by_label("I checked only part of the stack").check()
    dialog.get_by_label("Planes, last").fill("20")
    dialog.get_by_label("Rows, first").fill("11")
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
    assert np.array_equal(file.pixels, np.where(labels == deleted, 0, labels))
    page.get_by_role("button", name="New stack").click()
    annotated = page.get_by_role("region", name="Annotated stacks")
    expect(annotated).to_contain_text("1 correction")
    check_accessibility(page)
    page.on("dialog", lambda prompt: prompt.accept())
    annotated.get_by_role("button", name="Delete Zellkörper 1").click()
    expect(annotated).to_be_hidden()
    assert result.live.client.get("/annotations").json()["annotations"] == []


def test_annotated_stack_from_another_browser_is_shown(result: Result, open_page: OpenPage) -> None:
    page, labels = correct(result, open_page), result.labels
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, ids_by_size(labels)[0]))
    page.get_by_role("button", name="Save as annotated stack").click()
    page.get_by_role("dialog").get_by_label("Name").fill("by Ada")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator(".correct")).to_contain_text("Saved as annotated stack by Ada")
    other = correct(result, open_page)
    expect(other.locator(".correct")).to_contain_text(
        "This result was also corrected in another browser and saved as annotated stack by Ada"
    )
    check_accessibility(other)
    page.reload()
    open_correct_tab(page)
    expect(page.locator(".correct")).to_contain_text("Saved as annotated stack by Ada")
    expect(page.locator(".correct")).not_to_contain_text("another browser", use_inner_text=True)
    (annotation,) = result.live.client.get("/annotations").json()["annotations"]
    result.live.client.delete(f"/annotations/{annotation['id']}")


def test_corrections_remain_after_their_result_is_deleted(result: Result, open_page: OpenPage) -> None:
    job = result.live.run(b"", stack=result.stack, measurements="zip")["id"]
    page, labels = correct(result._replace(job=job), open_page), result.labels
    deleted = ids_by_size(labels)[:2]
    page.get_by_role("button", name="Delete", exact=True).click()
    for number, label in enumerate(deleted, 1):
        click_voxel(page, central_voxel(labels, label))
        expect(page.locator(".correct")).to_contain_text(f"{number} deleted")
    result.live.client.delete(f"/jobs/{job}")
    page.get_by_role("button", name="Save as annotated stack").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_contain_text("Save the corrected labels as a file instead.")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="New stack").click()
    entry = page.locator(".recent-job")
    expect(entry).to_contain_text("objects, corrected · 2 corrections")
    entry.click()
    expect(dialog).to_contain_text("The service no longer stores this result")
    check_accessibility(page)
    assert np.array_equal(export_labels(page), np.where(np.isin(labels, deleted), 0, labels))
    file = LabelTiff(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    page.on("dialog", lambda prompt: prompt.accept())
    dialog.get_by_role("button", name="Discard the corrections").click()
    expect(entry).to_have_count(0)


def test_results_are_compared_with_and_without_corrections(result: Result, open_page: OpenPage) -> None:
    page, labels = open_result(result, open_page), result.labels
    other_job = result.live.run(b"", stack=result.stack)["id"]
    page.evaluate(REMEMBER_JOB, {"job": other_job, "stack": result.stack, "objects": len(ids_by_size(labels))})
    open_correct_tab(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, central_voxel(labels, ids_by_size(labels)[0]))
    expect(page.locator(".correct")).to_contain_text("1 deleted")
    results = page.get_by_role("group", name="Results of this stack")
    current, other = results.locator("[aria-current]"), results.locator("button:not([aria-current])")
    expect(current).to_contain_text(f" {len(ids_by_size(labels)) - 1} objects, corrected")
    expect(other).to_have_text(f"{len(ids_by_size(labels))} objects")
    page.get_by_role("button", name="Undo").click()
    expect(current).to_have_text(re.compile(f" {len(ids_by_size(labels))} objects$"))
    page.get_by_role("button", name="Redo").click()
    expect(current).to_contain_text("objects, corrected")
    page.goto(f"/#compare={other_job},{result.job}")
    left, right = page.locator(".side-by-side").first, page.locator(".side-by-side").last
    footer = page.locator("#compare footer")
    objects = len(ids_by_size(labels))
    expect(footer).to_contain_text(f"{objects - 1} objects in both (overlap above 50%), 1 only on the left")
    expect(right).to_contain_text(f"{objects - 1} objects")
    tops = page.locator(".side-by-side .views").evaluate_all(
        "views => views.map(view => view.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    right.get_by_label("With 1 correction").uncheck()
    expect(footer).to_contain_text("0 only on the left, 0 only on the right")
    for side in (left, right):
        expect(side).to_contain_text(f"{objects} objects")
    check_accessibility(page)


def test_all_tools_work_with_the_keyboard(result: Result, open_page: OpenPage) -> None:
    page, labels = open_result(result, open_page), result.labels
    page.get_by_role("tab", name="Objects").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Merge")).to_be_visible()
    stage = page.locator(".view[data-axis=z] .stage")
    first, second, *_ = ids_by_size(labels)

    def press_at(voxel: tuple[int, int, int], *keys: str) -> None:
        go_to(page, voxel)
        stage.focus()
        for key in keys:
            page.keyboard.press(key)

    hint = page.locator(".hint")
    press_at(central_voxel(labels, first), "m", "Enter")
    press_at(central_voxel(labels, second), "Enter")
    expect(hint).to_contain_text("Merged objects")
    page.keyboard.press("Control+z")
    press_at(central_voxel(labels, first), "v", "Enter", "Delete")
    expect(hint).to_contain_text(f"Deleted object {first}")
    assert np.array_equal(export_labels(page), np.where(labels == first, 0, labels))
    page.keyboard.press("Control+z")
    z, y, x = central_voxel(labels, first)
    press_at((z, y, x), "x", "Shift+ArrowLeft", "Enter", "Shift+ArrowRight", "Shift+ArrowRight", "Enter")
    expect(hint).to_contain_text(f"Cut object {first}")
    page.keyboard.press("Control+z")
    empty = sliding_window_view(labels == 0, (10, 10), (1, 2)).all((3, 4))  # type: ignore[call-overload]
    corner = tuple(int(index) for index in np.argwhere(empty)[0])
    press_at(corner, "n", "a", "Enter", *["Shift+ArrowRight"] * 9, "Enter", *["Shift+ArrowDown"] * 9, "Enter", "c")
    expect(page.locator(".correct")).to_contain_text("1 outlined")
    press_at((z, y, x), "e", "[", "[", "Enter")
    expect(page.locator(".correct")).to_contain_text("1 erased")
    erased = export_labels(page)
    assert erased[z, y, x] == 0
    assert np.array_equal(
        erased[labels != first][labels[labels != first] > 0], labels[labels != first][labels[labels != first] > 0]
    )


def test_random_corrections_can_be_undone_redone_and_restored(nuclei: LiveServer, open_page: OpenPage) -> None:
    page = open_page(nuclei)
    for seed in range(3):
        outcome = page.evaluate(CHECK_PROPERTIES, [seed, 60])
        assert outcome["failures"] == [], seed
        assert outcome["kinds"] == ["add", "delete", "erase", "merge", "paint", "split"], seed


def test_corrections_of_a_large_stack_are_immediate(nuclei: LiveServer, open_page: OpenPage) -> None:
    times = open_page(nuclei).evaluate(MEASURE_SPEED)
    print({name: f"{milliseconds:.1f} ms" for name, milliseconds in times.items()})
    assert max(times.values()) < MAX_MILLISECONDS


def test_subsampled_result_is_corrected_at_full_resolution(result: Result, open_page: OpenPage) -> None:
    outcome = open_page(result.live).evaluate(CORRECT_SUBSAMPLED, [result.job, result.stack])
    assert outcome["before"] == outcome["after"] == {"position": [5, 10, 12], "step": [1, 2, 2], "labels": [24, 40, 40]}
    assert outcome["during"] == {"position": [5, 20, 24], "step": [1, 1, 1], "labels": [24, 80, 80]}
    assert outcome["voxel"] == [0.5, 0.2, 0.2]
    assert outcome["paused"] == "The image was reloaded. Your corrections are saved.Continue correcting"


def test_labels_too_large_for_the_browser_are_explained(nuclei: LiveServer, open_page: OpenPage) -> None:
    text = open_page(nuclei).evaluate(
        """async () => {
          const { CorrectView } = await import("/page/correct/correct_view.js");
          const fullShape = [400, 1998, 1998];
          const small = { data: new Uint16Array(8), shape: [2, 2, 2], step: [200, 999, 999], fullShape };
          const viewer = { scene: { state: { image: small, labels: small } } };
          const result = { job: { id: "0" }, stack: "", name: "" };
          const view = new CorrectView(result, viewer, 0, {}, new AbortController().signal);
          await view.enter();
          return view.root.textContent;
        }"""
    )
    assert "3.19 GB" in text
    assert "Segment and correct a smaller part" in text
