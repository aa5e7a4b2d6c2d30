"""Tests of comparisons, time series, channels and large stacks in the web UI, in a real browser."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import TIMEOUT_SECONDS, OpenPage, central_voxel, check_accessibility, choose_file, press_segment
from fakes import wait_until
from live import LabelTiff, LiveServer, as_tiff
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

# Returns the numbers of pixels in the XY view that are red, green, and both.
COUNT_COLORED_PIXELS = """() => {
  const canvas = document.querySelector(".view[data-axis=z] canvas.base");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = [0, 0, 0];
  for (let p = 0; p < data.length; p += 4) {
    counts[0] += data[p] > 99; counts[1] += data[p + 1] > 99; counts[2] += data[p] > 99 && data[p + 1] > 99;
  }
  return counts;
}"""

# Returns readouts that overlap the zoom buttons when their text is longest, and sliders that are too short for touch.
FIND_LAYOUT_PROBLEMS = """() => {
  const box = node => node.getBoundingClientRect();
  const overlappingReadouts = [...document.querySelectorAll(".readout")].filter(readout => {
    readout.textContent = "gray 65,535   object 12,345";
    return box(readout).right > box(readout.closest(".view").querySelector(".zoom")).left;
  });
  const shortSliders = [...document.querySelectorAll(".view-foot input")].filter(slider => box(slider).width < 90);
  return [...overlappingReadouts, ...shortSliders].map(node => node.outerHTML);
}"""

COMPARE_OBJECTS = """async ([first, second, ...hiddenFlags]) => {
  const { compareObjects, countOverlaps } = await import("/page/volumes/label_agreement.js");
  const [firstLabels, secondLabels] = [first, second].map(ids => ({ data: Uint16Array.from(ids) }));
  const overlaps = await countOverlaps(firstLabels, secondLabels, new AbortController().signal);
  const agreement = compareObjects(overlaps, hiddenFlags);
  return { ...agreement, colorIndices: agreement.colorIndices.map(indices => [...indices]) };
}"""

# Counts the overlaps of the objects of two stacks of 64 x 512 x 512 voxels, and returns the tasks above 50 ms.
FIND_LONG_TASKS = """async () => {
  const { countOverlaps } = await import("/page/volumes/label_agreement.js");
  const [first, second] = [11, 12].map(edge => {
    const data = new Uint16Array(64 << 18);
    for (let p = 0; p < 1 << 18; p++) data[p] = Math.floor((p >> 9) / edge) * 47 + Math.floor((p & 511) / edge);
    for (let z = 1; z < 64; z++) data.copyWithin(z << 18, 0, 1 << 18);
    return { data };
  });
  const durations = [];
  const observer = new PerformanceObserver(list => durations.push(...list.getEntries().map(entry => entry.duration)));
  await new Promise(resolve => setTimeout(resolve, 200));
  observer.observe({ entryTypes: ["longtask"] });
  const start = performance.now();
  const overlaps = await countOverlaps(first, second, new AbortController().signal);
  const milliseconds = performance.now() - start;
  await new Promise(resolve => setTimeout(resolve, 200));
  const abort = new AbortController();
  const aborted = countOverlaps(first, second, abort.signal);
  abort.abort();
  return { milliseconds, durations, count: overlaps.length, aborted: await aborted };
}"""


@pytest.fixture(scope="module")
def sample() -> NDArray[Any]:
    return np.asarray(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:124, 40:104])


def test_two_results_are_compared_side_by_side(nuclei: LiveServer, open_page: OpenPage, sample: NDArray[Any]) -> None:
    stack = nuclei.post("/stacks", as_tiff(sample)).json()["id"]
    jobs = [nuclei.run(b"", stack=stack, diameter="15,15,15px", minimum_size=size) for size in ("1um3", "40um3")]
    counts = [job["objects"] for job in jobs]
    assert counts[0] > counts[1] > 0
    page = open_page(nuclei)
    page.goto(f"/#compare={','.join(job['id'] for job in jobs)}")
    sides = page.locator(".side-by-side")
    agreement = f"{counts[1]} objects in both (overlap above 50%), {counts[0] - counts[1]} only in the first, 0 only in"
    expect(page.locator("#compare footer")).to_contain_text(agreement)
    for side, count in zip(sides.all(), counts, strict=True):
        expect(side).to_contain_text(f"{count} objects")
    check_accessibility(page)
    first, second = sides.all()
    first.locator(".view[data-axis=z] .stage").click(position={"x": 120, "y": 100})
    expect(second.locator(".caption").nth(1)).to_have_text(first.locator(".caption").nth(1).inner_text())
    expect(second).to_contain_text("Selected: ")
    second.get_by_label("Plane along z").fill("3")
    expect(first.locator(".caption").first).to_contain_text("z 4 / 24")
    second.get_by_role("button", name="+", exact=True).click()
    expect(first.locator(".scale-bar")).to_have_text(second.locator(".scale-bar").inner_text())
    for width, height in ((820, 1180), (768, 1024)):
        page.set_viewport_size({"width": width, "height": height})
        # One result is above the other.
        expect(first).to_have_js_property("clientWidth", width)
        assert page.evaluate(FIND_LAYOUT_PROBLEMS) == []
    first.get_by_role("link", name="Open this result").click()
    expect(page.locator("#side")).to_contain_text(f"{counts[0]} objects")


def test_objects_correspond_if_their_iou_exceeds_one_half(module_page: Page) -> None:
    rng = np.random.default_rng(0)
    first, other = (rng.integers(0, 4, 60).repeat(5) for _ in range(2))
    second = np.where(rng.random(300) < 0.8, first, other)
    common_count = sum(
        2 * np.sum((first == a) & (second == b)) > np.sum((first == a) | (second == b))
        for a in range(1, 4)
        for b in range(1, 4)
    )
    assert common_count > 0
    agreement = module_page.evaluate(COMPARE_OBJECTS, [first.tolist(), second.tolist()])
    assert (agreement["commonCount"], agreement["objectCounts"]) == (common_count, [3, 3])
    overlaps = np.array([[np.sum((first == a) & (second == b)) for b in range(1, 4)] for a in range(1, 4)])
    colors = agreement["colorIndices"]
    for a, b in np.ndindex(3, 3):
        are_best_partners = overlaps[a, b] == overlaps[a].max() == overlaps[:, b].max() > 0
        assert are_best_partners == (colors[0][a + 1] == colors[1][b + 1] != 0)
    hidden = module_page.evaluate(COMPARE_OBJECTS, [first.tolist(), second.tolist(), [0, 0, 1, 0], [0, 1]])
    masked = [np.where(first == 2, 0, first).tolist(), np.where(second == 1, 0, second).tolist()]
    assert hidden == module_page.evaluate(COMPARE_OBJECTS, masked) != agreement
    assert module_page.evaluate(COMPARE_OBJECTS, [first.tolist(), first.tolist()])["commonCount"] == 3
    empty = module_page.evaluate(COMPARE_OBJECTS, [first.tolist(), np.zeros(300, int).tolist()])
    assert (empty["commonCount"], empty["objectCounts"], empty["colorIndices"]) == (0, [3, 0], [[0] * 4, [0]])


def test_comparison_of_large_results_does_not_block_the_page(module_page: Page) -> None:
    result = module_page.evaluate(FIND_LONG_TASKS)
    assert result["count"] > 2000
    assert result["aborted"] is None
    assert sum(result["durations"]) < result["milliseconds"] / 2, result


def test_time_series_is_segmented_tracked_and_viewed(
    nuclei: LiveServer, open_page: OpenPage, sample: NDArray[Any]
) -> None:
    page = open_page(nuclei)
    series = np.stack([sample[:, shift : shift + 48, :48] for shift in (0, 0, 1, 2)])
    choose_file(page, as_tiff(series, metadata={"axes": "TZYX", "spacing": 0.5, "unit": "um"}))
    page.locator("#times").select_option("some")
    page.locator("#time-from").fill("2")
    page.locator("#time-from").press("Tab")
    expect(page.get_by_label("Displayed time point")).to_have_attribute("min", "1")
    page.locator("#link").check()
    page.get_by_label("How the object diameter is determined").select_option("none")
    check_accessibility(page)
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("at 3 time points")
    job = nuclei.client.get("/jobs").json()["jobs"][0]
    assert (job["parameters"]["time"], job["parameters"]["link"]) == ("1:4", "overlap")
    expect(page.locator("#summary")).to_contain_text("tracks")
    expect(page.locator("table.objects thead")).to_contain_text("Track")
    page.get_by_role("button", name="Time", exact=True).click()
    row = page.locator("tr[data-row]").first
    track = row.get_attribute("data-label")
    row.click()
    expect(page.locator(".toolbar")).to_contain_text("4 (2 to 4)")
    expect(page.locator(".readout")).to_contain_text(f"object {track}")
    page.get_by_role("button", name="Previous time point").click()
    expect(page.locator("tr[aria-selected='true']")).to_contain_text("3")
    page.get_by_role("tab", name="Export").click()
    expect(page.get_by_role("button", name="NumPy")).to_have_count(0)
    correct_a_time_point(nuclei, page)
    compare_a_series(nuclei, page, series.shape[1:])


def correct_a_time_point(live: LiveServer, page: Page) -> None:
    """Delete an object at the third time point, save an annotated stack, go to another time point and return."""
    page.get_by_role("tab", name="Correct").click()
    panel = page.get_by_role("tabpanel", name="Correct")
    expect(panel).to_contain_text("These are the labels of time point 3")
    job = live.client.get("/jobs").json()["jobs"][0]["id"]
    original = fetch_labels(live, job, 1)
    label = int(np.argmax(np.bincount(original.ravel())[1:])) + 1
    for axis, position in zip("zyx", central_voxel(original, label), strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(position))
    stage = page.locator(".view[data-axis=z] .stage")
    stage.press("Enter")
    expect(page.locator(".selected-object")).to_contain_text(f"Object {label} selected")
    stage.press("Delete")
    expect(panel).to_contain_text("1 deleted")
    page.get_by_role("button", name="Save as annotated stack").click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(panel).to_contain_text("Saved as annotated stack cells, time 3")
    annotation = live.client.get("/annotations").json()["annotations"][0]
    corrected = LabelTiff(live.client.get(f"/annotations/{annotation['id']}/labels").content).pixels
    assert annotation["job"] == job
    assert np.array_equal(corrected, np.where(original == label, 0, original))
    live.client.delete(f"/annotations/{annotation['id']}")
    page.get_by_role("button", name="Next time point").click()
    expect(panel).to_contain_text("no corrections")
    page.get_by_role("button", name="Previous time point").click()
    expect(panel).to_contain_text("1 deleted")


def fetch_labels(live: LiveServer, job: str, time: int) -> NDArray[Any]:
    """Return the labels [Z, Y, X] of a job at a time point."""
    answer = live.client.get(f"/jobs/{job}/planes", params={"time": time})
    shape = [int(length) for length in answer.headers["X-StackSeg-Shape"].split(",")]
    return np.frombuffer(answer.content, answer.headers["X-StackSeg-Dtype"]).reshape(shape)


def compare_a_series(live: LiveServer, page: Page, shape: tuple[int, ...]) -> None:
    """Compare a result for three time points with one for the last of them. One slider sets the time point of both."""
    job = live.client.get("/jobs").json()["jobs"][0]
    last_job = live.run(b"", stack=job["parameters"]["stack"], time="3", diameter="none")
    page.goto(f"/#compare={job['id']},{last_job['id']}")
    footer = page.locator("#compare footer")
    expect(footer).to_contain_text("2 (2 to 4)")
    expect(page.locator(".side-by-side").first).to_contain_text(" at 3 time points")
    expect(page.locator(".side-by-side").last).to_contain_text("This result does not include time point 2.")
    footer.get_by_label("Displayed time point").fill("3")
    expect(footer).to_contain_text(" 0 only in the first, 0 only in the second")
    expect(page.locator(".side-by-side").last).to_contain_text("Click an object")
    expect(page.locator(".caption").first).to_contain_text(f"/ {shape[0]}")
    check_accessibility(page)


def test_channel_is_selected_by_its_preview_and_overlaid(fake: LiveServer, open_page: OpenPage) -> None:
    pixels = np.zeros((4, 2, 32, 32), np.uint16)
    pixels[:, 0, :20] = pixels[:, 1, 12:] = 900
    channels = {"Name": ["left", "right"], "Color": [-16776961, 0x00FF00FF]}
    tifffile.imwrite(stack := io.BytesIO(), pixels, ome=True, metadata={"axes": "ZCYX", "Channel": channels})
    page = open_page(fake)
    choose_file(page, stack.getvalue())
    previews = page.get_by_role("group", name="Channel previews")
    previews.get_by_role("button", name="left").click()
    expect(page.locator("#channel")).to_have_value("0")
    expect(previews.get_by_role("button", name="left")).to_have_attribute("aria-pressed", "true")
    toggles = page.get_by_role("group", name="Displayed channels")
    toggles.get_by_role("button", name="right").click()
    page.get_by_label("Channel whose contrast is adjusted").select_option("1")
    check_accessibility(page)
    wait_until(lambda: count_colored_pixels(page)[2] > 0, TIMEOUT_SECONDS)
    red, green, both = count_colored_pixels(page)
    assert red > both
    assert green > both
    previews.get_by_role("button", name="right").click()
    wait_until(
        lambda: count_colored_pixels(page)[2] == count_colored_pixels(page)[0] == count_colored_pixels(page)[1] > 0,
        TIMEOUT_SECONDS,
    )


def count_colored_pixels(page: Page) -> list[int]:
    counts: list[int] = page.evaluate(COUNT_COLORED_PIXELS)
    return counts


def test_planes_of_a_large_stack_are_fetched_at_full_resolution(fake: LiveServer, open_page: OpenPage) -> None:
    stack = as_tiff(np.zeros((7, 1900, 1900), np.uint8), compression="zlib")
    page = open_page(fake)
    with (
        page.expect_response(lambda response: "axis=y" in response.url) as y_response,
        page.expect_response("**axis=x**") as x_response,
    ):
        choose_file(page, stack)
    assert y_response.value.headers["x-stackseg-shape"] == "7,1,1900"
    assert x_response.value.headers["x-stackseg-shape"] == "7,1900,1"
    expect(page.locator(".caption").nth(1)).to_contain_text("/ 1900")


def test_long_title_does_not_widen_a_narrow_page(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake, viewport={"width": 820, "height": 600})
    title = "a_stack_" * 12
    choose_file(page, as_tiff(np.zeros((4, 16, 16), np.uint8)), f"{title}.tif")
    expect(page.locator("#title")).to_contain_text(title)
    expect(page).to_have_title(f"{title}.tif \N{EN DASH} StackSeg")
    expect(page.locator("#title")).to_be_focused()
    for width in (820, 390):
        page.set_viewport_size({"width": width, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_upload_shows_its_progress_and_can_be_canceled(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake)
    page.route("**/stacks", lambda _route: None)
    choose_file(page, as_tiff(np.zeros((4, 16, 16), np.uint8)))
    expect(page.get_by_role("progressbar", name="Upload")).to_be_visible()
    expect(page.locator("#start")).to_contain_text("kB")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()


def test_incomplete_and_mistyped_links_are_explained_on_the_start_view(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake)
    expect(page.locator("#file")).to_be_attached()
    ids = dict.fromkeys(("job", "stack", "folder", "project", "annotate", "annotated", "training"), "0" * 31)
    links = [*ids.items(), ("compare", "0" * 32), ("project", "a/../b"), ("project", "%"), ("job", "%")]
    for kind, resource_id in links:
        page.evaluate("link => (location.hash = link)", f"{kind}={resource_id}")
        expect(page.locator("#problem")).to_contain_text("This link is incomplete or mistyped.")
        expect(page.locator("#start")).to_be_visible()
        expect(page.locator("body")).not_to_have_class("busy")
        assert page.evaluate("location.hash") == ""
        page.get_by_role("button", name="Close").click()
    # A well-formed id of a deleted resource has the more specific message of the service.
    page.evaluate("location.hash = `project=${'0'.repeat(32)}`")
    expect(page.locator("#problem")).to_contain_text("There is no such project")
