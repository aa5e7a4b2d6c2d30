"""Display of a stack in the web UI: keyboard shortcuts, contrast and screenshots."""

from __future__ import annotations

import io
import itertools

import numpy as np
from browsing import OpenPage, check_accessibility, choose_file, drag, press_segment
from live import LiveServer, as_tiff
from PIL import Image
from playwright.sync_api import Page, expect

STACK = as_tiff(np.arange(9 * 16 * 16, dtype=np.uint16).reshape(9, 16, 16))


def open_stack(live: LiveServer, open_page: OpenPage, stack: bytes = STACK) -> Page:
    page = open_page(live, accept_downloads=True)
    choose_file(page, stack)
    expect(page.locator(".caption").first).to_contain_text("z 5 / 9")
    return page


def test_shortcuts_work_wherever_the_focus_is(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_stack(fake, open_page)
    xy, xz = page.locator("[data-axis=z] .caption"), page.locator("[data-axis=y] .caption")
    page.locator(".stack-name").click()
    page.keyboard.press("j")
    expect(xy).to_contain_text("z 6 / 9")
    page.keyboard.press("ArrowUp")
    expect(xy).to_contain_text("z 5 / 9")
    page.get_by_role("button", name="Smooth").focus()
    page.keyboard.press("j")
    expect(xy).to_contain_text("z 6 / 9")
    page.locator(".view[data-axis=y] .stage").hover()
    page.keyboard.press("j")
    expect(xz).to_contain_text("y 10 / 16")
    # In a field, a key is input.
    page.get_by_text("More settings").click()
    page.get_by_label("Skip windows darker than").press_sequentially("kj")
    expect(page.get_by_label("Skip windows darker than")).to_have_value("kj")
    expect(xz).to_contain_text("y 10 / 16")
    expect(xy).to_contain_text("z 6 / 9")


def test_contrast_is_set_with_numbers_and_automatically(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_stack(fake, open_page)
    low, high = page.get_by_label("Gray value shown as black"), page.get_by_label("Gray value shown at full brightness")
    automatic = [low.input_value(), high.input_value()]
    assert 0 <= float(automatic[0]) < 100 < 2200 < float(automatic[1]) < 2304
    brightness = "document.querySelector('.base').getContext('2d').getImageData(CENTER, CENTER, 1, 1).data[0]"
    brightness = brightness.replace("CENTER", "document.querySelector('.base').height / 2")
    before = page.evaluate(brightness)
    high.fill("1200")
    high.press("Enter")
    expect(page.get_by_label("White level")).not_to_have_value("1000")
    page.wait_for_function(f"{brightness} > {before} + 50")
    page.get_by_label("White level").fill("1000")
    expect(high).to_have_value("2303")
    page.get_by_role("button", name="Auto", exact=True).click()
    assert [low.input_value(), high.input_value()] == automatic
    check_accessibility(page)


def test_object_diameter_is_set_with_a_circle_and_with_a_line(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_stack(fake, open_page, as_tiff(np.zeros((9, 64, 64), np.uint16)))
    circle, field = page.locator(".circle"), page.get_by_label("Object diameter in voxels")
    expect(circle).to_be_hidden()
    page.get_by_label("How the object diameter is determined").select_option("px")
    expect(page.locator("#settings")).to_contain_text("hold Shift and draw a line")
    expect(circle).to_be_visible()
    stage = page.locator(".view[data-axis=z] .stage").bounding_box()
    box = circle.bounding_box()
    assert stage is not None
    assert box is not None
    x, y = stage["x"] + stage["width"] / 2, stage["y"] + stage["height"] / 2
    pixels_per_voxel = (box["width"]) / 15
    drag(page, [(x + box["width"] / 2 - 1, y), (x + 15 * pixels_per_voxel, y)])
    expect(field).to_have_value("30")
    page.keyboard.down("Shift")
    drag(page, [(x, y + 18 * pixels_per_voxel), (x, y), (x + 12 * pixels_per_voxel, y + 2 * pixels_per_voxel)])
    page.keyboard.up("Shift")
    # 20 voxels: the line is the hypotenuse of 12 and 16.
    expect(field).to_have_value("20")
    expect(page.locator(".diameter-line")).to_be_hidden()
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("classes")
    assert fake.client.get("/jobs").json()["jobs"][0]["parameters"]["diameter"] == "20px"


def test_screenshot_has_a_scale_bar(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_stack(fake, open_page, as_tiff(np.zeros((9, 16, 16), np.uint8)))
    press_segment(page)
    page.get_by_role("tab", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Screenshot (PNG)").click()
    picture = np.asarray(Image.open(io.BytesIO(download.value.path().read_bytes())).convert("L"))
    bar_width = page.locator(".scale-bar").evaluate("bar => bar.getBoundingClientRect().width")
    longest_white_run = max(
        sum(1 for _ in run) for row in picture for is_white, run in itertools.groupby(row > 250) if is_white
    )
    assert abs(longest_white_run - bar_width) <= 2


def test_classes_have_a_legend_with_their_volumes(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_stack(fake, open_page)
    press_segment(page)
    # 2,203 of the 2,304 gray values are above 100. A voxel has 0.02 cubic micrometers.
    row = page.get_by_role("tabpanel", name="Classes").get_by_role("row").nth(1)
    expect(row).to_contain_text("44.1 µm³")
    expect(row).to_contain_text("96%")
    check_accessibility(page)
