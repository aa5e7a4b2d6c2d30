"""Several results, time points and channels on the page, and stacks that it does not hold whole; in a real browser."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import SECONDS, Open, check_accessibility, middle, put, segment
from fakes import until
from live import Answer, Live, as_tiff
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

# How many pixels of the XY view are red, green, and both.
COLOURS = """() => {
  const canvas = document.querySelector(".view[data-axis=z] canvas.base");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = [0, 0, 0];
  for (let p = 0; p < data.length; p += 4) {
    counts[0] += data[p] > 99; counts[1] += data[p + 1] > 99; counts[2] += data[p] > 99 && data[p + 1] > 99;
  }
  return counts;
}"""

# What the longest words about a voxel cover, and the sliders that are too short for a finger.
CROWDED = """() => {
  const box = one => one.getBoundingClientRect();
  const covered = [...document.querySelectorAll(".readout")].filter(readout => {
    readout.textContent = "grey 65,535   object 12,345";
    return box(readout).right > box(readout.closest(".view").querySelector(".zoom")).left;
  });
  const short = [...document.querySelectorAll(".view-foot input")].filter(slider => box(slider).width < 90);
  return [...covered, ...short].map(one => one.outerHTML);
}"""

COMPARE = """async ([one, other]) => {
  const { compareObjects } = await import("/page/volumes/label_agreement.js");
  const found = compareObjects({ data: Uint16Array.from(one) }, { data: Uint16Array.from(other) });
  return { ...found, entries: found.entries.map(entries => [...entries]) };
}"""


@pytest.fixture(scope="module")
def sample() -> NDArray[Any]:
    return np.asarray(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:124, 40:104])


def test_two_results_are_looked_at_side_by_side(nuclei: Live, open_page: Open, sample: NDArray[Any]) -> None:
    stack = nuclei.post("/stacks", as_tiff(sample)).json()["id"]
    jobs = [nuclei.run(b"", stack=stack, diameter="15px", minimum_size=least) for least in ("1um3", "60um3")]
    counts = [job["objects"] for job in jobs]
    assert counts[0] > counts[1] > 0
    page = open_page(nuclei)
    page.goto(f"/#compare={','.join(job['id'] for job in jobs)}")
    sides = page.locator(".side-by-side")
    only = f"{counts[1]} objects in both (they share more than half), {counts[0] - counts[1]} on the left alone, 0 on"
    expect(page.locator("#compare footer")).to_contain_text(only)
    for side, count in zip(sides.all(), counts, strict=True):
        expect(side).to_contain_text(f"{count} objects")
    check_accessibility(page)
    first, second = sides.all()
    first.locator(".view[data-axis=z] .stage").click(position={"x": 120, "y": 100})
    expect(second.locator(".caption").nth(1)).to_have_text(first.locator(".caption").nth(1).inner_text())
    expect(second).to_contain_text("Here: ")
    second.get_by_label("Plane along z").fill("3")
    expect(first.locator(".caption").first).to_contain_text("z 4 / 24")
    second.get_by_role("button", name="+", exact=True).click()
    expect(first.locator(".scale-bar")).to_have_text(second.locator(".scale-bar").inner_text())
    for width, height in ((820, 1180), (768, 1024)):
        page.set_viewport_size({"width": width, "height": height})
        expect(first).to_have_js_property("clientWidth", width // 2)
        assert page.evaluate(CROWDED) == []
    first.get_by_role("link", name="Open this result").click()
    expect(page.locator("#side")).to_contain_text(f"{counts[0]} objects")


def test_objects_are_the_same_where_they_share_more_than_half(fake: Live, open_page: Open) -> None:
    page = open_page(fake)
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 4, 60).repeat(5) for _ in range(2))
    mixed = np.where(rng.random(300) < 0.8, one, other)
    common = sum(
        2 * np.sum((one == a) & (mixed == b)) > np.sum((one == a) | (mixed == b))
        for a in range(1, 4)
        for b in range(1, 4)
    )
    assert common > 0
    found = page.evaluate(COMPARE, [one.tolist(), mixed.tolist()])
    assert (found["common"], found["counts"]) == (common, [3, 3])
    shared = np.array([[np.sum((one == a) & (mixed == b)) for b in range(1, 4)] for a in range(1, 4)])
    for a, b in np.ndindex(3, 3):
        most = shared[a, b] == shared[a].max() == shared[:, b].max() > 0
        assert most == (found["entries"][0][a + 1] == found["entries"][1][b + 1] != 0)
    assert page.evaluate(COMPARE, [one.tolist(), one.tolist()])["common"] == 3
    alone = page.evaluate(COMPARE, [one.tolist(), np.zeros(300, int).tolist()])
    assert (alone["common"], alone["counts"], alone["entries"]) == (0, [3, 0], [[0] * 4, [0]])


def test_a_series_is_segmented_and_looked_at_through_time(nuclei: Live, open_page: Open, sample: NDArray[Any]) -> None:
    page = open_page(nuclei)
    points = np.stack([sample[:, shift : shift + 48, :48] for shift in (0, 0, 1, 2)])
    put(page, as_tiff(points, metadata={"axes": "TZYX", "spacing": 0.5, "unit": "um"}))
    page.locator("#times").select_option("some")
    page.locator("#time-from").fill("1")
    page.locator("#time-from").press("Tab")
    expect(page.get_by_label("Time point that is shown")).to_have_attribute("min", "1")
    page.locator("#link").check()
    page.get_by_label("How the diameter is found").select_option("none")
    check_accessibility(page)
    segment(page)
    expect(page.locator("#words")).to_contain_text("at 3 time points")
    job = nuclei.client.get("/jobs").json()["jobs"][0]
    assert (job["parameters"]["time"], job["parameters"]["link"]) == ("1:4", "overlap")
    expect(page.locator("#words")).to_contain_text("tracks")
    expect(page.locator("table.objects thead")).to_contain_text("Parent")
    page.get_by_role("button", name="Time", exact=True).click()
    row = page.locator("tr[data-row]").first
    track = row.get_attribute("data-label")
    row.click()
    expect(page.locator(".toolbar")).to_contain_text("3 of 1 to 3")
    expect(page.locator(".readout")).to_contain_text(f"object {track}")
    page.get_by_role("button", name="Earlier").click()
    expect(page.locator("tr[aria-selected='true']")).to_contain_text("2")
    page.get_by_role("tab", name="Take").click()
    expect(page.get_by_role("button", name="NumPy")).to_have_count(0)
    correct_a_time_point(nuclei, page)
    compare_a_series(nuclei, page, points.shape[1:])


def correct_a_time_point(live: Live, page: Page) -> None:
    """Delete an object at time point 2, keep the labels as an annotated stack, look elsewhere and come back."""
    page.get_by_role("tab", name="Correct").click()
    panel = page.get_by_role("tabpanel", name="Correct")
    expect(panel).to_contain_text("These are the labels of time point 2")
    job = live.client.get("/jobs").json()["jobs"][0]["id"]
    before = planes(live, job, 1)
    label = int(np.argmax(np.bincount(before.ravel())[1:])) + 1
    for axis, place in zip("zyx", middle(before, label), strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(place))
    stage = page.locator(".view[data-axis=z] .stage")
    stage.press("Enter")
    expect(page.locator(".chosen-object")).to_contain_text(f"Object {label} is chosen")
    stage.press("Delete")
    expect(panel).to_contain_text("1 deleted")
    page.get_by_role("button", name="Keep as annotated stack").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(panel).to_contain_text("Kept as annotated stack cells, time 2")
    kept = live.client.get("/annotations").json()["annotations"][0]
    after = Answer(live.client.get(f"/annotations/{kept['id']}/labels").content).pixels
    assert kept["job"] == job
    assert np.array_equal(after, np.where(before == label, 0, before))
    live.client.delete(f"/annotations/{kept['id']}")
    page.get_by_role("button", name="Later").click()
    expect(panel).to_contain_text("nothing corrected")
    page.get_by_role("button", name="Earlier").click()
    expect(panel).to_contain_text("1 deleted")


def planes(live: Live, job: str, time: int) -> NDArray[Any]:
    """Labels [Z, Y, X] of a time point of a job."""
    answer = live.client.get(f"/jobs/{job}/planes", params={"time": time})
    shape = [int(length) for length in answer.headers["X-StackSeg-Shape"].split(",")]
    return np.frombuffer(answer.content, answer.headers["X-StackSeg-Dtype"]).reshape(shape)


def compare_a_series(live: Live, page: Page, shape: tuple[int, ...]) -> None:
    """Look at a result of three time points beside one of the last of them, by one slider for both."""
    job = live.client.get("/jobs").json()["jobs"][0]
    last = live.run(b"", stack=job["parameters"]["stack"], time="3", diameter="none")
    page.goto(f"/#compare={job['id']},{last['id']}")
    footer = page.locator("#compare footer")
    expect(footer).to_contain_text("1 of 1 to 3")
    expect(page.locator(".side-by-side").first).to_contain_text(" at 3 time points")
    expect(page.locator(".side-by-side").last).to_contain_text("Time point 1 is not in this result.")
    footer.get_by_label("Time point that is shown").fill("3")
    expect(footer).to_contain_text(" 0 on the left alone, 0 on the right alone")
    expect(page.locator(".side-by-side").last).to_contain_text("Click an object")
    expect(page.locator(".caption").first).to_contain_text(f"/ {shape[0]}")
    check_accessibility(page)


def test_a_channel_is_chosen_by_its_picture_and_shown_over_another(fake: Live, open_page: Open) -> None:
    pixels = np.zeros((4, 2, 32, 32), np.uint16)
    pixels[:, 0, :20] = pixels[:, 1, 12:] = 900
    channels = {"Name": ["left", "right"], "Color": [-16776961, 0x00FF00FF]}
    tifffile.imwrite(stack := io.BytesIO(), pixels, ome=True, metadata={"axes": "ZCYX", "Channel": channels})
    page = open_page(fake)
    put(page, stack.getvalue())
    pictures = page.get_by_role("group", name="Channels by their pictures")
    pictures.get_by_role("button", name="left").click()
    expect(page.locator("#channel")).to_have_value("0")
    expect(pictures.get_by_role("button", name="left")).to_have_attribute("aria-pressed", "true")
    shown = page.get_by_role("group", name="Channels that are shown")
    shown.get_by_role("button", name="right").click()
    page.get_by_label("Channel whose contrast is set").select_option("1")
    check_accessibility(page)
    until(lambda: colours(page)[2] > 0, SECONDS)
    red, green, both = colours(page)
    assert red > both
    assert green > both
    pictures.get_by_role("button", name="right").click()
    until(lambda: colours(page)[2] == colours(page)[0] == colours(page)[1] > 0, SECONDS)


def colours(page: Page) -> list[int]:
    found: list[int] = page.evaluate(COLOURS)
    return found


def test_every_view_of_a_stack_that_is_too_large_is_fetched_as_it_is(fake: Live, open_page: Open) -> None:
    large = as_tiff(np.zeros((7, 1900, 1900), np.uint8), compression="zlib")
    page = open_page(fake)
    with page.expect_response(lambda told: "axis=y" in told.url) as across, page.expect_response("**axis=x**") as along:
        put(page, large)
    assert across.value.headers["x-stackseg-shape"] == "7,1,1900"
    assert along.value.headers["x-stackseg-shape"] == "7,1900,1"
    expect(page.locator(".caption").nth(1)).to_contain_text("/ 1900")


def test_an_upload_tells_how_far_it_is_and_can_be_cancelled(fake: Live, open_page: Open) -> None:
    page = open_page(fake)
    page.route("**/stacks", lambda _route: None)
    put(page, as_tiff(np.zeros((4, 16, 16), np.uint8)))
    expect(page.get_by_role("progressbar", name="Upload")).to_be_visible()
    expect(page.locator("#start")).to_contain_text("kB")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Try the sample")).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()


def test_each_model_has_a_picture_of_what_it_finds(nuclei: Live, open_page: Open, sample: NDArray[Any]) -> None:
    for model in nuclei.client.get("/models").json()["models"]:
        picture = nuclei.client.get(model["picture"])
        assert (picture.headers["content-type"], picture.content[:4]) == ("image/png", b"\x89PNG")
    page = open_page(nuclei)
    put(page, as_tiff(sample))
    expect(page.get_by_role("img", name="Objects that nuclei finds in its sample")).to_be_visible()
    page.locator("select:has(option[value=membranes])").select_option("membranes")
    expect(page.get_by_role("img", name="Objects that membranes finds in its sample")).to_be_visible()


def test_a_model_without_a_picture_says_so(fake: Live) -> None:
    assert [model["picture"] for model in fake.client.get("/models").json()["models"]] == [None]
    assert fake.client.get("/models/bands/picture").status_code == 404
