"""The 3D view of the web UI: selection by a click, cut, gray values, axes and scale bar."""

from __future__ import annotations

import numpy as np
import pytest
from browsing import TIMEOUT_SECONDS, OpenPage, check_accessibility, choose_file, press_segment
from fakes import wait_until
from live import LiveServer, as_tiff
from playwright.sync_api import Page, expect

CENTER = 24

# Returns the numbers of pixels of the 3D view that are red, green, blue and white.
COUNT_COLORS = """() => {
  const gl = document.querySelector("canvas.rendering").getContext("webgl2");
  const pixels = new Uint8Array(4 * gl.drawingBufferWidth * gl.drawingBufferHeight);
  gl.readPixels(0, 0, gl.drawingBufferWidth, gl.drawingBufferHeight, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
  const counts = [0, 0, 0, 0];
  for (let p = 0; p < pixels.length; p += 4) {
    const [red, green, blue] = pixels.subarray(p, p + 3);
    counts[0] += red > 150 && green < 130 && blue < 130;
    counts[1] += green > 150 && red < 150 && blue < 150;
    counts[2] += blue > 150 && red < 150 && green < 190;
    counts[3] += red > 150 && red === green && green === blue;
  }
  return counts;
}"""


def open_ball(live: LiveServer, open_page: OpenPage) -> Page:
    """Open the enlarged 3D view of a segmented ball in the center of a stack. The ball is brightest in its center."""
    z, y, x = np.ogrid[:48, :48, :48]
    distances = np.sqrt((z - CENTER) ** 2 + (y - CENTER) ** 2 + (x - CENTER) ** 2)
    stack = np.where(distances < 10, 240 - 10 * distances, 20).astype(np.uint8)
    # The time that software takes for a drawing is proportional to the area of the view.
    page = open_page(live, viewport={"width": 900, "height": 500})
    choose_file(page, as_tiff(stack, resolution=(2.0, 2.0)))
    expect(page.locator(".caption").first).to_contain_text("/ 48")
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("classes")
    page.get_by_role("button", name="3D").click()
    page.get_by_role("button", name="Enlarge").click()
    if page.get_by_role("button", name="3D").is_disabled():
        pytest.skip("This browser has no WebGL 2.")
    return page


def find_plane(page: Page, axis: str) -> int:
    """Return the index of the plane that a view shows."""
    return int(page.get_by_label(f"Plane along {axis}").input_value())


def measure_offsets(page: Page) -> list[int]:
    """Return the distances of the displayed planes from the center of the ball."""
    return [abs(find_plane(page, axis) - CENTER) for axis in "zyx"]


def click_center(page: Page) -> None:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    canvas = page.locator("canvas.rendering")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] / 2})


def test_click_selects_the_first_visible_object_or_the_brightest_voxel(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_ball(fake, open_page)
    click_center(page)
    page.get_by_role("button", name="Enlarge").click()
    expect(page.locator(".readout")).to_contain_text("object 1")
    # The surface of the ball.
    wait_until(lambda: abs(np.linalg.norm(measure_offsets(page)) - 10) < 2, TIMEOUT_SECONDS)
    # The arrow keys rotate the focused 3D view. Other keys are forwarded to the slices.
    plane = find_plane(page, "z")
    page.locator("canvas.rendering").focus()
    for key, expected_plane in (("ArrowLeft", plane), ("j", plane + 1), ("k", plane)):
        page.keyboard.press(key)
        expect(page.get_by_label("Plane along z")).to_have_value(str(expected_plane))
    page.get_by_role("button", name="Intensity").click()
    click_center(page)
    wait_until(lambda: max(measure_offsets(page)) <= 1, TIMEOUT_SECONDS)
    # Most of the ball is cut off.
    page.get_by_role("button", name="Objects").last.click()
    page.get_by_label("Removed part of the 3D view").fill("0.6")
    click_center(page)
    wait_until(lambda: abs(find_plane(page, "z") - 0.6 * 48) <= 2, TIMEOUT_SECONDS)


def test_box_has_colored_axes_and_a_scale_bar(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_ball(fake, open_page)
    check_accessibility(page)
    wait_until(lambda: min(page.evaluate(COUNT_COLORS)[:3]) > 20, TIMEOUT_SECONDS)
    page.get_by_role("button", name="Intensity").click()
    wait_until(lambda: page.evaluate(COUNT_COLORS)[3] > 100, TIMEOUT_SECONDS)
    for name in "xyz":
        expect(page.locator(f".axis-{name}")).to_be_visible()
    bar = page.locator(".rendering-stage .scale-bar")
    length, unit = bar.inner_text().split()
    width, height = page.locator("canvas.rendering").evaluate("node => [node.clientWidth, node.clientHeight]")
    # The longest edge, 24 um, has two thirds of the shorter side of the view.
    pixels_per_micrometer = min(width, height) / 1.5 / 24
    assert unit == "µm"
    assert abs(bar.evaluate("node => node.clientWidth") - float(length) * pixels_per_micrometer) <= 1
