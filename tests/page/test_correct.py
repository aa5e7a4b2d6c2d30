"""Correcting labels in a real browser, from the first click to the file."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
from browsing import Open, check_accessibility, middle
from live import Answer, Live, as_tiff
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect
from scipy import ndimage

from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume
from service.inference.measurements import measure

PROPERTIES = (Path(__file__).parent / "label_properties.js").read_text(encoding="utf-8")
SPEED = (Path(__file__).parent / "label_speed.js").read_text(encoding="utf-8")
MILLISECONDS = 100

# The result in steps of two, as large ones are shown: what the views show before, while and after it is corrected, and
# what the panel says when another channel is chosen meanwhile.
COARSE = """async ([job, stack]) => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { CorrectView } = await import("/page/correct/correct_view.js");
  const { fetchVolume } = await import("/page/volumes/planes.js");
  const { signal } = new AbortController(), whole = [24, 80, 80], step = [1, 2, 2], nothing = () => {};
  const fetched = (address, step) => fetchVolume({ address, parameters: {}, whole }, signal, nothing, step);
  const viewer = new Viewer(document.getElementById("viewer"));
  const image = await fetched(`stacks/${stack}/planes`, step);
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.setLabels(await fetched(`jobs/${job}/planes`, step));
  viewer.fetchWhole = () => fetched(`stacks/${stack}/planes`, [1, 1, 1]);
  viewer.scene.set({ at: [5, 10, 12] });
  const shown = () => {
    const { at, image, labels } = viewer.scene.state;
    return { at, step: image.step, labels: labels.shape };
  };
  const view = new CorrectView({ job: { id: job, model: "nuclei/1" }, stack, name: "" }, viewer, 0, {}, signal);
  const before = shown();
  await view.enter();
  const meanwhile = shown(), edges = view.mode.editor.voxel;
  view.leave();
  const after = shown();
  await view.enter();
  viewer.open(image, { z: 0.5, y: 0.2, x: 0.2 });
  viewer.drawNow();
  return { before, meanwhile, after, edges, paused: view.root.textContent };
}"""

REMEMBER = 'async entry => (await import("/page/stack/recent_jobs.js")).remember(entry)'


class Result(NamedTuple):
    """A part of the sample as it is kept, a job that is done with it, its labels, [24, 80, 80], and its pixels."""

    live: Live
    stack: str
    job: str
    labels: NDArray[np.uint16]
    volume: Volume


@pytest.fixture(scope="module")
def result(nuclei: Live) -> Result:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:140, 40:120]
    stack = nuclei.post("/stacks", as_tiff(sample)).json()["id"]
    job = nuclei.run(b"", stack=stack, measurements="zip")
    labels = np.load(io.BytesIO(nuclei.result(job, Accept="application/x-npy").content))
    return Result(nuclei, stack, job["id"], labels, Volume.from_array(sample[None]))


def look_at(result: Result, open_page: Open) -> Page:
    page = open_page(result.live, accept_downloads=True)
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    page.goto(f"/#job={result.job}")
    expect(page.locator("#words")).to_contain_text("objects, median diameter")
    return page


def enter(page: Page) -> None:
    page.get_by_role("tab", name="Correct").click()
    expect(page.get_by_role("button", name="Merge")).to_be_visible()


def correct(result: Result, open_page: Open) -> Page:
    page = look_at(result, open_page)
    enter(page)
    return page


def go_to(page: Page, voxel: tuple[int, int, int]) -> None:
    for axis, place in zip("zyx", voxel, strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(place))


def point_at(page: Page) -> tuple[float, float]:
    """Return the place of the XY view's crosshair on the screen."""
    view = page.locator(".view[data-axis=z]")
    vertical, horizontal = view.locator(".cross.vertical"), view.locator(".cross.horizontal")
    # The crosshair follows with the next frame.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    across, down = vertical.bounding_box(), horizontal.bounding_box()
    assert across is not None
    assert down is not None
    return across["x"] + across["width"] / 2, down["y"] + down["height"] / 2


def click_voxel(page: Page, voxel: tuple[int, int, int]) -> None:
    go_to(page, voxel)
    page.mouse.click(*point_at(page))


def drag(page: Page, way: list[tuple[float, float]]) -> None:
    page.mouse.move(*way[0])
    page.mouse.down()
    for place in way[1:]:
        page.mouse.move(*place)
    page.mouse.up()


def largest(labels: NDArray[Any]) -> list[int]:
    """All ids, those of large objects first."""
    return [int(label) for label in np.argsort(np.bincount(labels.ravel())[1:])[::-1] + 1]


def download(page: Page, button: str) -> bytes:
    with page.expect_download() as downloading:
        page.get_by_role("button", name=button, exact=True).click()
    return Path(downloading.value.path()).read_bytes()


def read_table(text: bytes) -> dict[str, NDArray[np.float64]]:
    """Columns of a table of objects by their names; True is 1."""
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    assert {row.pop("unit") for row in rows} == {"um"}
    as_number = {"True": 1.0, "False": 0.0}
    return {name: np.array([float(as_number.get(row[name], row[name])) for row in rows]) for name in rows[0]}


def corrected(page: Page) -> NDArray[Any]:
    loaded: NDArray[Any] = np.load(io.BytesIO(download(page, "NumPy")))
    return loaded


def test_what_is_corrected_is_what_is_saved_and_survives_a_reload(result: Result, open_page: Open) -> None:
    page, labels = correct(result, open_page), result.labels
    check_accessibility(page)
    kept, merged, deleted, cut, *_ = largest(labels)
    hint = page.locator(".hint")
    page.get_by_role("button", name="Merge").click()
    click_voxel(page, middle(labels, kept))
    click_voxel(page, middle(labels, merged))
    expect(hint).to_contain_text(f"Objects {kept} and {merged} are one")
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, middle(labels, deleted))
    expect(page.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    expect(page.locator("#words")).to_have_text(f"{len(largest(labels)) - 2} objects. As corrected.")
    expected = np.where(labels == merged, kept, np.where(labels == deleted, 0, labels))
    assert np.array_equal(corrected(page), expected)

    page.get_by_role("button", name="Undo").click()
    expect(hint).to_contain_text("Taken back: deleted")
    assert np.array_equal(corrected(page), np.where(labels == merged, kept, labels))
    page.keyboard.press("Control+Shift+Z")
    assert np.array_equal(corrected(page), expected)

    page.get_by_role("button", name="Cut").click()
    z, y, x = middle(labels, cut)
    go_to(page, (z, y, x))
    across, down = point_at(page)
    drag(page, [(across - 40, down + 1), (across + 40, down + 1)])
    expect(hint).to_contain_text(f"Object {cut} is cut")
    parts = corrected(page)
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
    expect(page.locator("#words")).to_contain_text(re.compile(rf"^{objects} objects, .*As corrected\.$"))
    volume = measured["area"][measured["label"].tolist().index(new)]
    page.locator(".scroller").evaluate("scroller => { scroller.scrollTop = scroller.scrollHeight }")
    expect(page.locator(f"tr[data-label='{new}']")).to_contain_text(f"{volume:.3g}")
    page.get_by_role("tab", name="Take").click()
    expect(page.get_by_role("tabpanel", name="Take")).to_contain_text("Those with your corrections are under Correct")

    page.reload()
    expect(page.get_by_role("tab", name="Correct")).to_contain_text("3 corrections")
    expect(page.locator("#words")).to_contain_text("As corrected.")
    enter(page)
    expect(hint).to_contain_text("3 corrections of earlier are back")
    assert np.array_equal(corrected(page), parts)
    file = Answer(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    assert np.array_equal(file.pixels, parts)

    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("tab", name="Correct").click()
    expect(other.locator(".correct")).to_contain_text("being corrected in another tab")
    other.get_by_role("button", name="Go on here").click()
    expect(other.locator(".hint")).to_contain_text("3 corrections of earlier are back")
    expect(page.locator(".correct")).to_contain_text("go on in another tab")
    other.get_by_role("button", name="Undo").click()
    expect(other.locator(".correct")).to_contain_text("1 merged, 1 deleted")
    page.get_by_role("button", name="Go on here").click()
    expect(hint).to_contain_text("2 corrections of earlier are back")
    expect(other.locator(".correct")).to_contain_text("go on in another tab")
    other.close()
    assert np.array_equal(corrected(page), expected)

    page.get_by_role("button", name="Discard all corrections").click()
    assert np.array_equal(corrected(page), labels)
    page.get_by_role("tab", name="Objects").click()
    expect(page.locator("#words")).not_to_contain_text("As corrected.")
    page.locator("tr[data-label]").first.click()
    expect(page.locator(".readout")).to_contain_text("object")


def test_objects_are_drawn_split_and_painted(result: Result, open_page: Open) -> None:
    page, labels = correct(result, open_page), result.labels
    hint = page.locator(".hint")
    new = int(labels.max()) + 1
    page.get_by_role("button", name="Outline").click()
    free = middle(labels == 0, 1)
    for plane in (8, 14):
        go_to(page, (plane, free[1], free[2]))
        across, down = point_at(page)
        angles = np.linspace(0, 6.2, 40)
        drag(page, [(across + 60 * np.cos(angle), down + 60 * np.sin(angle)) for angle in angles])
        expect(hint).to_contain_text("Go to another plane")
    drawn = corrected(page)
    assert np.array_equal(np.where(drawn == new, 0, drawn), labels)
    assert [bool((plane == new).any()) for plane in drawn[7:16]] == [False, *[True] * 7, False]
    within = np.zeros_like(labels[0], bool)
    within[free[1] - 4 : free[1] + 4, free[2] - 4 : free[2] + 4] = True
    assert ((drawn[8:15] == new) | (labels[8:15] > 0))[:, within].all()

    page.get_by_role("button", name="Split").click()
    object_to_split = largest(labels)[0]
    voxels = np.argwhere(drawn == object_to_split)
    plane = voxels[voxels[:, 0] == middle(drawn, object_to_split)[0]]
    for place in (plane[np.argmin(plane[:, 2])], plane[np.argmax(plane[:, 2])]):
        click_voxel(page, (int(place[0]), int(place[1]), int(place[2])))
    expect(hint).to_contain_text("Split.")
    split = corrected(page)
    assert np.array_equal(np.where(split == new + 1, object_to_split, split), drawn)
    assert (split == new + 1).any()

    page.get_by_role("button", name="Brush").click()
    expect(page.get_by_label("Size of the brush")).to_be_visible()
    z, y, x = middle(split, new)
    go_to(page, (z, y, x))
    across, down = point_at(page)
    drag(page, [(across, down), (across + 60, down), (across + 120, down)])
    expect(page.locator(".correct")).to_contain_text("1 painted")
    painted = corrected(page)
    assert set(np.unique(painted[painted != split])) == {new}
    assert not (split[painted != split]).any()
    chosen = page.locator(".chosen-object")
    expect(chosen).to_have_text(re.compile(f"Object {new} is chosen: .* voxels, .* µm³"))

    free = middle(ndimage.binary_erosion(painted == 0, np.ones((3, 9, 9))), 1)
    newest = int(painted.max()) + 1
    click_voxel(page, free)
    expect(hint).to_contain_text(f"Object {newest} is new.")
    expect(chosen).to_contain_text(f"Object {newest} is chosen")
    free = middle(ndimage.binary_erosion(corrected(page) == 0, np.ones((3, 9, 9))), 1)
    page.get_by_label("Add to chosen one").check()
    click_voxel(page, free)
    expect(hint).to_contain_text(f"Object {newest} is larger.")
    grown = corrected(page)
    assert set(np.unique(grown[grown != painted])) == {newest}
    assert grown[free] == newest
    check_accessibility(page)


def test_corrected_labels_are_kept_as_an_annotated_stack(result: Result, open_page: Open) -> None:
    page, labels = correct(result, open_page), result.labels
    deleted = largest(labels)[0]
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, middle(labels, deleted))
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Improve the model").click()
    expect(dialog.get_by_role("heading")).to_have_text("Keep as annotated stack")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Keep as annotated stack").click()
    check_accessibility(page)
    dialog.get_by_label("Name").fill("Zellkörper 1")
    dialog.get_by_label("Only a part was checked").check()
    dialog.get_by_label("Planes, last").fill("20")
    dialog.get_by_label("Rows, first").fill("11")
    dialog.get_by_role("button", name="Keep").click()
    expect(page.locator(".hint")).to_contain_text("Kept as Zellkörper 1")
    page.get_by_role("button", name="Improve the model").click()
    expect(dialog.get_by_role("heading")).to_have_text("Improve a model")
    expect(dialog.get_by_label("Zellkörper 1")).to_be_checked()
    dialog.get_by_role("button", name="Cancel").click()
    (kept,) = result.live.client.get("/annotations").json()["annotations"]
    assert (kept["name"], kept["changes"], kept["job"]) == ("Zellkörper 1", 1, result.job)
    assert kept["region"] == "0:20,10:80,0:80"
    file = Answer(result.live.client.get(f"/annotations/{kept['id']}/labels").content)
    assert np.array_equal(file.pixels, np.where(labels == deleted, 0, labels))
    page.get_by_role("button", name="New stack").click()
    annotated = page.get_by_role("region", name="Annotated stacks")
    expect(annotated).to_contain_text("1 correction")
    check_accessibility(page)
    page.on("dialog", lambda asked: asked.accept())
    annotated.get_by_role("button", name="Delete Zellkörper 1").click()
    expect(annotated).to_be_hidden()
    assert result.live.client.get("/annotations").json()["annotations"] == []


def test_another_browser_is_told_of_corrected_labels_that_were_kept(result: Result, open_page: Open) -> None:
    page, labels = correct(result, open_page), result.labels
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, middle(labels, largest(labels)[0]))
    page.get_by_role("button", name="Keep as annotated stack").click()
    page.get_by_role("dialog").get_by_label("Name").fill("by Ada")
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(page.locator(".correct")).to_contain_text("Kept as annotated stack by Ada")
    other = correct(result, open_page)
    expect(other.locator(".correct")).to_contain_text(
        "Corrected in another browser, and kept as annotated stack by Ada"
    )
    check_accessibility(other)
    page.reload()
    enter(page)
    expect(page.locator(".correct")).to_contain_text("Kept as annotated stack by Ada")
    expect(page.locator(".correct")).not_to_contain_text("another browser", use_inner_text=True)
    (kept,) = result.live.client.get("/annotations").json()["annotations"]
    result.live.client.delete(f"/annotations/{kept['id']}")


def test_corrections_outlive_the_result_that_they_were_made_on(result: Result, open_page: Open) -> None:
    job = result.live.run(b"", stack=result.stack, measurements="zip")["id"]
    page, labels = correct(result._replace(job=job), open_page), result.labels
    deleted = largest(labels)[:2]
    page.get_by_role("button", name="Delete", exact=True).click()
    for number, label in enumerate(deleted, 1):
        click_voxel(page, middle(labels, label))
        expect(page.locator(".correct")).to_contain_text(f"{number} deleted")
    result.live.client.delete(f"/jobs/{job}")
    page.get_by_role("button", name="Keep as annotated stack").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Keep").click()
    expect(dialog).to_contain_text("Save the corrected labels as a file instead.")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="New stack").click()
    entry = page.locator(".recent-job")
    expect(entry).to_contain_text("objects, as corrected · 2 corrections")
    entry.click()
    expect(dialog).to_contain_text("The service does not keep this result")
    check_accessibility(page)
    assert np.array_equal(corrected(page), np.where(np.isin(labels, deleted), 0, labels))
    file = Answer(download(page, "OME-TIFF"))
    assert (file.axes, file.voxel_size) == ("ZYX", (0.5, 0.2, 0.2))
    page.on("dialog", lambda asked: asked.accept())
    dialog.get_by_role("button", name="Discard the corrections").click()
    expect(entry).to_have_count(0)


def test_results_are_compared_as_corrected_and_as_segmented(result: Result, open_page: Open) -> None:
    page, labels = look_at(result, open_page), result.labels
    plain = result.live.run(b"", stack=result.stack)["id"]
    page.evaluate(REMEMBER, {"job": plain, "stack": result.stack, "objects": len(largest(labels))})
    enter(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    click_voxel(page, middle(labels, largest(labels)[0]))
    expect(page.locator(".correct")).to_contain_text("1 deleted")
    results = page.get_by_role("group", name="Results of this stack")
    own, other = results.locator("[aria-current]"), results.locator("button:not([aria-current])")
    expect(own).to_contain_text(f" {len(largest(labels)) - 1} objects, as corrected")
    expect(other).to_have_text(f"{len(largest(labels))} objects")
    page.get_by_role("button", name="Undo").click()
    expect(own).to_have_text(re.compile(f" {len(largest(labels))} objects$"))
    page.get_by_role("button", name="Redo").click()
    expect(own).to_contain_text("as corrected")
    page.goto(f"/#compare={plain},{result.job}")
    left, right = page.locator(".side-by-side").first, page.locator(".side-by-side").last
    footer = page.locator("#compare footer")
    objects = len(largest(labels))
    expect(footer).to_contain_text(f"{objects - 1} objects in both (they share more than half), 1 on the left alone")
    expect(right).to_contain_text(f"{objects - 1} objects")
    tops = page.locator(".side-by-side .views").evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert tops[0] == tops[1]
    right.get_by_label("With 1 correction").uncheck()
    expect(footer).to_contain_text("0 on the left alone, 0 on the right alone")
    for side in (left, right):
        expect(side).to_contain_text(f"{objects} objects")
    check_accessibility(page)


def test_everything_is_done_by_keys(result: Result, open_page: Open) -> None:
    page, labels = look_at(result, open_page), result.labels
    page.get_by_role("tab", name="Objects").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Merge")).to_be_visible()
    stage = page.locator(".view[data-axis=z] .stage")
    one, other, *_ = largest(labels)

    def press_at(voxel: tuple[int, int, int], *keys: str) -> None:
        go_to(page, voxel)
        stage.focus()
        for key in keys:
            page.keyboard.press(key)

    hint = page.locator(".hint")
    press_at(middle(labels, one), "m", "Enter")
    press_at(middle(labels, other), "Enter")
    expect(hint).to_contain_text("are one")
    page.keyboard.press("Control+z")
    press_at(middle(labels, one), "v", "Enter", "Delete")
    expect(hint).to_contain_text(f"Object {one} is deleted")
    assert np.array_equal(corrected(page), np.where(labels == one, 0, labels))
    page.keyboard.press("Control+z")
    z, y, x = middle(labels, one)
    press_at((z, y, x), "x", "Shift+ArrowLeft", "Enter", "Shift+ArrowRight", "Shift+ArrowRight", "Enter")
    expect(hint).to_contain_text(f"Object {one} is cut")
    page.keyboard.press("Control+z")
    empty = sliding_window_view(labels == 0, (10, 10), (1, 2)).all((3, 4))  # type: ignore[call-overload]
    corner = tuple(int(place) for place in np.argwhere(empty)[0])
    press_at(corner, "n", "a", "Enter", *["Shift+ArrowRight"] * 9, "Enter", *["Shift+ArrowDown"] * 9, "Enter", "c")
    expect(page.locator(".correct")).to_contain_text("1 outlined")
    press_at((z, y, x), "e", "[", "[", "Enter")
    expect(page.locator(".correct")).to_contain_text("1 erased")
    erased = corrected(page)
    assert erased[z, y, x] == 0
    assert np.array_equal(
        erased[labels != one][labels[labels != one] > 0], labels[labels != one][labels[labels != one] > 0]
    )


def test_corrections_can_be_undone_and_repeated_and_lose_no_voxel(nuclei: Live, open_page: Open) -> None:
    page = open_page(nuclei)
    for seed in range(3):
        found = page.evaluate(PROPERTIES, [seed, 60])
        assert found["wrong"] == [], seed
        assert found["kinds"] == ["add", "delete", "erase", "merge", "paint", "split"], seed


def test_a_correction_of_a_large_stack_is_immediate(nuclei: Live, open_page: Open) -> None:
    times = open_page(nuclei).evaluate(SPEED)
    print({name: f"{milliseconds:.1f} ms" for name, milliseconds in times.items()})
    assert max(times.values()) < MILLISECONDS


def test_what_is_shown_in_coarse_steps_is_corrected_in_full_resolution(result: Result, open_page: Open) -> None:
    told = open_page(result.live).evaluate(COARSE, [result.job, result.stack])
    assert told["before"] == told["after"] == {"at": [5, 10, 12], "step": [1, 2, 2], "labels": [24, 40, 40]}
    assert told["meanwhile"] == {"at": [5, 20, 24], "step": [1, 1, 1], "labels": [24, 80, 80]}
    assert told["edges"] == [0.5, 0.2, 0.2]
    assert told["paused"] == "The stack is shown anew. Your corrections are kept.Go on correcting"


def test_labels_that_are_too_large_for_the_browser_say_what_to_do(nuclei: Live, open_page: Open) -> None:
    text = open_page(nuclei).evaluate(
        """async () => {
          const { CorrectView } = await import("/page/correct/correct_view.js");
          const small = { data: new Uint16Array(8), shape: [2, 2, 2], step: [200, 999, 999], whole: [400, 1998, 1998] };
          const viewer = { scene: { state: { image: small, labels: small } } };
          const result = { job: { id: "0" }, stack: "", name: "" };
          const view = new CorrectView(result, viewer, 0, {}, new AbortController().signal);
          await view.enter();
          return view.root.textContent;
        }"""
    )
    assert "3.19 GB" in text
    assert "Segment a smaller part" in text
