"""Tests of annotating a stack from nothing in the web UI, in a real browser."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import (
    OpenPage,
    central_voxel,
    check_accessibility,
    drag,
    export_labels,
    find_crosshair,
    go_to,
    open_correct_tab,
    read_measurement,
)
from live import LabelTiff, LiveServer, as_tiff
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

MEASURE_STROKES = read_measurement("stroke_speed.js")
MAX_FRAME_MILLISECONDS = 16
# Two voxels that are far enough apart for strokes with the initial size of the brush.
FIRST, SECOND = (8, 30, 30), (8, 60, 50)

# Whether the browser stores a box that begins at a plane. Changes are stored after they are displayed.
STORES_FIRST_PLANE = """async first => {
  const opening = indexedDB.open("stackseg-corrections");
  await new Promise(done => { opening.onsuccess = done; });
  const reading = opening.result.transaction("edits").objectStore("edits").getAll();
  await new Promise(done => { reading.onsuccess = done; });
  opening.result.close();
  return reading.result.some(record => record?.box?.low[0] === first);
}"""

# Encodes annotations of different regions, as they are stored on the server, opens them again, and encodes them again.
# Returns those that differ.
REOPEN_REGIONS = """async () => {
  const { LabelEditor } = await import("/page/volumes/label_edit.js");
  const { decodeRegion, encodeAnnotation } = await import("/page/volumes/annotated_region.js");
  const shape = [6, 10, 12], step = [1, 1, 1];
  const createEditor = () => new LabelEditor({ data: new Uint16Array(720), shape, step, fullShape: shape }, [1, 1, 1]);
  const drawn = createEditor();
  for (const [id, center] of [[3, [2, 4, 4]], [7, [3, 5, 8]]])
    drawn.stamp(center, 1.5, { id, isErasing: false, axis: null, isOverwriting: true });
  drawn.commit("paint");
  const box = { low: [1, 2, 2], high: [5, 9, 11] };
  const planes = (...pairs) => pairs.map(([axis, at]) => ({ axis, at }));
  const regions = [
    { kind: "whole", box: null, planes: [] },
    { kind: "objects", box: null, planes: [] },
    { kind: "box", box, planes: [] },
    { kind: "planes", box: null, planes: planes([0, 1], [0, 3]) },
    { kind: "planes", box: null, planes: planes([1, 4]) },
    { kind: "planes", box: null, planes: planes([0, 2], [2, 6]) },
    { kind: "planes", box, planes: planes([0, 2], [0, 3]) },
    { kind: "planes", box: null, planes: planes(...[0, 1, 2, 3, 4, 5].map(at => [0, at])) },
  ];
  return regions.flatMap(region => {
    const { labels, query } = encodeAnnotation(drawn, region);
    const { region: stored, ignore_label = null, partial = false } = query;
    const editor = createEditor();
    editor.addLabels(labels.data, ignore_label ?? 0);
    const again = encodeAnnotation(editor, decodeRegion({ region: stored || null, ignore_label, partial }, labels));
    const isSame = again.query.region === stored && String(again.labels.data) === String(labels.data);
    return isSame ? [] : [[region, query, again.query]];
  });
}"""


@pytest.fixture(scope="module")
def stack(nuclei: LiveServer) -> str:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:140, 40:120]
    return str(nuclei.post("/stacks", as_tiff(sample)).json()["id"])


def open_annotation(live: LiveServer, stack: str, open_page: OpenPage) -> Page:
    page = open_page(live, accept_downloads=True)
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    page.goto(f"/#stack={stack}")
    page.get_by_role("button", name="Annotate by hand").click()
    expect(page.get_by_role("button", name="Brush")).to_be_visible()
    return page


def paint(page: Page, voxel: tuple[int, int, int]) -> None:
    """Paint a short stroke in the XY view."""
    go_to(page, voxel)
    x, y = find_crosshair(page)
    drag(page, [(x, y), (x + 6, y), (x, y + 6)])


def test_empty_stack_is_annotated_in_a_few_planes(nuclei: LiveServer, stack: str, open_page: OpenPage) -> None:
    page = open_annotation(nuclei, stack, open_page)
    panel, dialog = page.locator(".correct"), page.get_by_role("dialog")
    expect(panel).to_contain_text("0 objects, no changes")
    paint(page, FIRST)
    expect(panel).to_contain_text("1 object · 1 painted")
    paint(page, SECOND)
    page.get_by_label("Add to the selected object").check()
    paint(page, (13, 60, 50))
    page.keyboard.press("i")
    expect(panel).to_contain_text("2 objects · 3 painted, 1 filled")
    labels = export_labels(page)
    assert [int((labels == 1).any((1, 2))[z]) for z in range(7, 10)] == [0, 1, 0]
    assert np.array_equal(np.flatnonzero((labels == 2).any((1, 2))), np.arange(8, 14))

    page.get_by_role("button", name="Save as annotated stack").click()
    expect(dialog).to_contain_text("Mark the planes in which every object is labeled")
    expect(dialog.get_by_role("button", name="Save")).to_be_disabled()
    dialog.get_by_role("button", name="Cancel").click()
    page.locator(".view[data-axis=z] .stage").focus()
    page.keyboard.press("p")
    go_to(page, FIRST)
    page.get_by_role("button", name="Mark plane XY 9").click()
    expect(page.get_by_role("button", name="Unmark plane XY 9")).to_be_visible()
    check_accessibility(page)
    page.get_by_role("button", name="Save as annotated stack").click()
    expect(dialog).to_contain_text("Every object is labeled in planes XY 9, XY 14.")
    dialog.get_by_role("button", name="Save").click()
    expect(panel).to_contain_text("Saved as annotated stack")
    (annotation,) = nuclei.client.get("/annotations").json()["annotations"]
    assert (annotation["objects"], annotation["region"], annotation["stack"]) == (2, "8:14,0:80,0:80", stack)
    stored = LabelTiff(nuclei.client.get(f"/annotations/{annotation['id']}/labels").content).pixels
    is_unknown = (labels == 0) & ~np.isin(np.arange(24), [8, 13])[:, None, None]
    is_unknown[[*range(8), *range(14, 24)]] = False
    assert np.array_equal(stored, np.where(is_unknown, annotation["ignore_label"], labels))

    continue_in_another_browser(nuclei, open_page, labels)
    page.reload()
    expect(page.locator(".hint")).to_contain_text("4 saved changes were restored")
    expect(page.get_by_role("button", name="Mark plane")).to_be_visible()
    assert np.array_equal(export_labels(page), labels)
    expect(panel).to_contain_text("Saved as annotated stack")
    page.get_by_role("button", name="New stack").click()
    drafts = page.get_by_role("region", name="Annotations in this browser")
    expect(drafts).to_contain_text("2 objects · planes XY 9, XY 14")
    check_accessibility(page)
    stored = page.get_by_role("region", name="Annotated stacks on the server")
    for link in (drafts.get_by_role("link"), stored.get_by_role("link")):
        link.click()
        expect(page.locator(".hint")).to_contain_text("4 saved changes were restored")
        page.get_by_role("button", name="New stack").click()
    page.on("dialog", lambda prompt: prompt.accept())
    drafts.get_by_role("button", name="Delete the annotation").click()
    expect(drafts).to_have_count(0)
    nuclei.client.delete(f"/annotations/{annotation['id']}")


def test_opened_annotations_have_the_stored_regions(module_page: Page) -> None:
    assert module_page.evaluate(REOPEN_REGIONS) == []


def continue_in_another_browser(live: LiveServer, open_page: OpenPage, labels: NDArray[Any]) -> None:
    """Open the annotated stack in a browser without the annotation, change it, and save it."""
    page = open_page(live, accept_downloads=True)
    page.get_by_role("region", name="Annotated stacks on the server").get_by_role("link").click()
    panel, dialog = page.locator(".correct"), page.get_by_role("dialog")
    expect(panel).to_contain_text("2 objects · loaded from the server")
    assert np.array_equal(export_labels(page), labels)
    go_to(page, FIRST)
    expect(page.get_by_role("button", name="Unmark plane XY 9")).to_be_visible()
    expect(page.get_by_role("list", name="Marked planes").get_by_role("listitem")).to_have_text(["XY 9", "XY 14"])
    if live.client.get("/limits").json()["training"]:
        # The labels are already saved.
        page.get_by_role("button", name="Train a model").click()
        expect(dialog).to_contain_text("Base model")
        dialog.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Brush").click()
    page.get_by_label("Create a new object").check()
    paint(page, (8, 60, 20))
    save_again(page, replace=False)
    newest, earlier = live.client.get("/annotations").json()["annotations"]
    assert (newest["objects"], newest["region"]) == (3, "8:14,0:80,0:80")
    save_again(page, replace=True)
    replacement, other = live.client.get("/annotations").json()["annotations"]
    assert (replacement["id"] != newest["id"], other["id"]) == (True, earlier["id"])
    live.client.delete(f"/annotations/{replacement['id']}")


def save_again(page: Page, *, replace: bool) -> None:
    page.get_by_role("button", name="Save as annotated stack").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Delete the earlier version").set_checked(replace)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".hint")).to_contain_text("Saved as ")


def test_box_is_drawn_and_changed_in_three_views(nuclei: LiveServer, stack: str, open_page: OpenPage) -> None:
    page = open_annotation(nuclei, stack, open_page)
    paint(page, FIRST)
    page.get_by_label("A box").check()
    page.get_by_role("button", name="Draw the box").click()
    go_to(page, (8, 40, 40))
    x, y = find_crosshair(page)
    drag(page, [(x - 60, y - 60), (x, y), (x + 30, y + 30)])

    def read_box() -> list[tuple[int, int]]:
        return [
            (
                int(page.get_by_label(f"{name}, first").input_value()),
                int(page.get_by_label(f"{name}, last").input_value()),
            )
            for name in ("Planes", "Rows", "Columns")
        ]

    planes, rows, columns = read_box()
    assert planes == (1, 24)
    assert rows == columns
    assert 1 < rows[0] < 41 < rows[1] < 80
    # In the XZ view, drag the edge at the last plane upwards.
    view = page.locator(".view[data-axis=y]")
    stage, line = view.locator(".stage").bounding_box(), view.locator(".crosshair.horizontal").bounding_box()
    assert stage is not None
    assert line is not None
    go_to(page, (23, 40, 40))
    bottom = find_horizontal_line(page, "y")
    go_to(page, (12, 40, 40))
    middle = find_horizontal_line(page, "y")
    voxel = (bottom - middle) / 11
    center = stage["x"] + stage["width"] / 2
    drag(page, [(center, bottom + voxel / 2), (center, middle), (center, middle + voxel / 2)])
    assert read_box() == [(1, 13), rows, columns]
    page.get_by_label("Planes, first").fill("5")
    page.get_by_label("Planes, first").blur()
    page.wait_for_function(STORES_FIRST_PLANE, arg=4)
    page.reload()
    expect(page.get_by_label("Planes, last")).to_have_value("13")
    assert read_box() == [(5, 13), rows, columns]
    page.get_by_role("button", name="Save as annotated stack").click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator(".correct")).to_contain_text("Saved as annotated stack")
    (annotation,) = nuclei.client.get("/annotations").json()["annotations"]
    region = f"4:13,{rows[0] - 1}:{rows[1]},{columns[0] - 1}:{columns[1]}"
    assert (annotation["region"], annotation["ignore_label"], annotation["partial"]) == (region, None, False)
    nuclei.client.delete(f"/annotations/{annotation['id']}")
    page.get_by_label("Nowhere: only some objects are labeled").check()
    page.get_by_role("button", name="Save as annotated stack").click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    (annotation,) = nuclei.client.get("/annotations").json()["annotations"]
    assert (annotation["ignore_label"], annotation["partial"]) == (None, True)
    nuclei.client.delete(f"/annotations/{annotation['id']}")


def find_horizontal_line(page: Page, axis: str) -> float:
    """Return the vertical screen position of the crosshair in a view."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    line = page.locator(f".view[data-axis={axis}] .crosshair.horizontal").bounding_box()
    assert line is not None
    return line["y"] + line["height"] / 2


def test_selected_object_is_extended_with_an_outline(nuclei: LiveServer, stack: str, open_page: OpenPage) -> None:
    page = open_annotation(nuclei, stack, open_page)
    paint(page, FIRST)
    paint(page, SECOND)
    page.get_by_role("button", name="Select", exact=True).click()
    go_to(page, FIRST)
    page.mouse.click(*find_crosshair(page))
    page.get_by_role("button", name="Outline").click()
    page.get_by_label("Add to the selected object").check()
    go_to(page, (12, FIRST[1], FIRST[2]))
    x, y = find_crosshair(page)
    angles = np.linspace(0, 6.2, 24)
    drag(page, [(x + 30 * np.cos(angle), y + 30 * np.sin(angle)) for angle in angles])
    expect(page.locator(".hint")).to_contain_text("Extended object 1")
    labels = export_labels(page)
    assert set(np.unique(labels)) == {0, 1, 2}
    assert np.array_equal(np.flatnonzero((labels == 1).any((1, 2))), np.arange(8, 13))


def test_annotation_of_a_missing_stack_is_exported(nuclei: LiveServer, open_page: OpenPage) -> None:
    stack = nuclei.post("/stacks", as_tiff(np.full((6, 40, 50), 9, np.uint8))).json()["id"]
    page = open_annotation(nuclei, stack, open_page)
    paint(page, (3, 20, 25))
    expect(page.locator(".correct")).to_contain_text("1 painted")
    labels = export_labels(page)
    assert nuclei.client.delete(f"/stacks/{stack}").status_code == 204
    page.get_by_role("button", name="New stack").click()
    page.get_by_role("region", name="Annotations in this browser").get_by_role("link").click()
    dialog = page.get_by_role("dialog", name="This stack has expired")
    expect(dialog).to_contain_text("Your 1 change")
    check_accessibility(page)
    assert np.array_equal(export_labels(page), labels)
    assert labels.any()
    page.on("dialog", lambda prompt: prompt.accept())
    dialog.get_by_role("button", name="Discard the annotation").click()
    expect(page.get_by_role("region", name="Annotations in this browser")).to_have_count(0)


def test_suggested_objects_are_accepted_by_click(nuclei: LiveServer, stack: str, open_page: OpenPage) -> None:
    labels = np.load(io.BytesIO(nuclei.result(nuclei.run(b"", stack=stack), Accept="application/x-npy").content))
    page = open_annotation(nuclei, stack, open_page)
    panel = page.locator(".correct")
    page.get_by_role("button", name="Suggest objects").click()
    object_count = len(np.unique(labels)) - 1
    expect(panel).to_contain_text(f"{object_count} suggested objects, shown in gray")
    check_accessibility(page)
    assert not export_labels(page).any()
    first, second = (int(label) for label in np.argsort(np.bincount(labels.ravel())[1:])[-2:] + 1)
    for label in (first, second):
        go_to(page, central_voxel(labels, label))
        page.mouse.click(*find_crosshair(page))
    expect(panel).to_contain_text(f"{object_count - 2} suggested objects")
    accepted = export_labels(page)
    assert np.array_equal(accepted, np.where(labels == first, 1, np.where(labels == second, 2, 0)))
    page.get_by_role("button", name="Undo").click()
    expect(panel).to_contain_text(f"{object_count - 1} suggested objects")
    page.get_by_role("button", name="Accept all").click()
    expect(panel).to_contain_text("All suggested objects are accepted")
    assert np.array_equal(export_labels(page) > 0, labels > 0)
    assert len(np.unique(export_labels(page))) == object_count + 1


def test_objects_are_deleted_by_size_confidence_and_border(nuclei: LiveServer, stack: str, open_page: OpenPage) -> None:
    job = nuclei.run(b"", stack=stack, diameter="none", measurements="zip")
    page = open_page(nuclei, accept_downloads=True)
    page.goto(f"/#job={job['id']}")
    open_correct_tab(page)
    labels = export_labels(page)
    page.get_by_text("Delete by size, confidence or border").click()
    details, delete = page.locator(".bulk-delete"), page.locator(".bulk-delete").get_by_role("button")
    expect(delete).to_be_disabled()
    sizes = np.bincount(labels.ravel())[1:] * 0.5 * 0.2 * 0.2
    limit = round(float(np.median(sizes)), 2)
    page.get_by_label("Smaller than").fill(str(limit))
    small = np.flatnonzero((sizes > 0) & (sizes < limit)) + 1
    expect(details).to_contain_text(f"{len(small)} of {np.count_nonzero(sizes)} objects match and are shown in red.")
    check_accessibility(page)
    delete.click()
    expected = np.where(np.isin(labels, small), 0, labels)
    assert np.array_equal(export_labels(page), expected)
    page.get_by_role("button", name="Undo").click()
    assert np.array_equal(export_labels(page), labels)
    page.get_by_label("Smaller than").fill("")
    rows = nuclei.result(job, Accept="text/csv").text.splitlines()
    names = rows[0].split(",")
    confidences = {
        int(cells[names.index("label")]): 100 * float(cells[names.index("confidence")])
        for cells in (row.split(",") for row in rows[1:])
    }
    limit = sorted(confidences.values())[len(confidences) // 2]
    page.get_by_label("Confidence below").fill(str(limit))
    doubtful = [label for label, confidence in confidences.items() if confidence < limit]
    expect(delete).to_have_text(re.compile(f"Delete {len(doubtful)} objects?"))
    delete.click()
    assert np.array_equal(export_labels(page), np.where(np.isin(labels, doubtful), 0, labels))
    page.get_by_role("button", name="Undo").click()
    page.get_by_label("Confidence below").fill("")
    page.get_by_label("Touching the border").check()
    faces = [np.take(labels, index, axis) for axis in range(3) for index in (0, -1)]
    cut_off = np.unique(np.concatenate([face.ravel() for face in faces]))[1:]
    expect(details).to_contain_text(f"{len(cut_off)} of {np.count_nonzero(sizes)} objects match and are shown in red.")
    delete.click()
    assert np.array_equal(export_labels(page), np.where(np.isin(labels, cut_off), 0, labels))


def test_strokes_and_undo_are_drawn_within_a_frame(nuclei: LiveServer, open_page: OpenPage) -> None:
    page = open_page(nuclei)
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    times = page.evaluate(MEASURE_STROKES)
    print({name: f"{times[name]:.1f} ms" for name in ("stroke", "undo")})
    assert times["edits"] == 5
    assert max(times["stroke"], times["undo"]) < MAX_FRAME_MILLISECONDS
