"""Tests of the web UI for files with several scenes, in a real browser."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import OpenPage, check_accessibility, choose_file, press_segment
from leica_files import write_lif
from live import LiveServer
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

# Returns the mean gray value of each preview of a scene, -1 for a preview without a picture.
MEASURE_PREVIEWS = """() => [...document.querySelectorAll("[aria-label='Scene previews'] button")].map(button => {
  const canvas = button.querySelector("canvas");
  if (canvas === null) return -1;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((_, index) => index % 4 === 0).reduce((sum, value) => sum + value, 0) / (data.length / 4);
})"""


@pytest.fixture(scope="module")
def sample() -> NDArray[Any]:
    return np.asarray(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36])


def write_scenes(scenes: dict[str, NDArray[Any]], **options: Any) -> bytes:
    """Return an OME-TIFF with an image [Z, Y, X] or [Z, C, Y, X] for each name."""
    with tifffile.TiffWriter(file := io.BytesIO(), ome=True) as writer:
        for name, pixels in scenes.items():
            sizes = {f"PhysicalSize{axis}{part}": value for axis, size in zip("ZYX", (0.5, 0.2, 0.2), strict=True)
                     for part, value in (("", size), ("Unit", "µm"))}  # fmt: skip
            axes = "ZYX" if pixels.ndim == 3 else "ZCYX"
            writer.write(pixels, photometric="minisblack", metadata={"Name": name, "axes": axes, **sizes}, **options)
    return file.getvalue()


def draw_square(shape: tuple[int, ...], edge: int) -> NDArray[Any]:
    """Return an image with a bright square in the corner of each plane."""
    pixels = np.full(shape, 10, np.uint8)
    pixels[..., :edge, :edge] = 200
    return pixels


def get_previews(page: Page) -> Any:
    return page.get_by_role("group", name="Scene previews").get_by_role("button")


def get_size(page: Page) -> Any:
    return page.locator("#settings .chip", has_text="Size").first


def test_scene_is_selected_by_its_preview_and_segmented(fake: LiveServer, open_page: OpenPage) -> None:
    scenes = {
        "Overview": draw_square((4, 2, 64, 80), 60),
        "Position 1": draw_square((3, 40, 48), 20),
        "Position 2": draw_square((5, 24, 32), 8),
    }
    page = open_page(fake)
    choose_file(page, write_scenes(scenes))
    expect(get_size(page)).to_have_text("Size80 × 64 × 4")
    expect(page.locator("#scene")).to_have_value("")
    expect(get_previews(page)).to_have_text(list(scenes))
    page.wait_for_function(f"() => ({MEASURE_PREVIEWS})().every(mean => mean > 1)")
    first, second, third = page.evaluate(MEASURE_PREVIEWS)
    assert first > second > third
    page.locator("#channel").select_option("1")
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()
    get_previews(page).nth(1).click()
    expect(get_size(page)).to_have_text("Size48 × 40 × 3")
    expect(page.locator("#scene")).to_have_value("1")
    expect(get_previews(page).nth(1)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".caption").first).to_contain_text("/ 3")
    check_accessibility(page)
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("classes")
    job = fake.client.get("/jobs").json()["jobs"][0]
    assert (job["parameters"]["scene"], job["parameters"].get("channel")) == ("1", None)
    assert np.array_equal(read_pixels(fake.result(job).content), scenes["Position 1"] > 100)
    # The labels of a result are not shown over another scene.
    page.locator("#scene").select_option("3: Position 2")
    expect(page.locator("#side")).to_contain_text("Check your stack")
    expect(get_size(page)).to_have_text("Size32 × 24 × 5")
    page.go_back()
    expect(page.locator("#summary")).to_contain_text("classes")
    expect(get_size(page)).to_have_text("Size48 × 40 × 3")
    expect(page.locator("#scene")).to_have_value("1")


def test_scene_has_to_be_selected_if_the_file_has_no_default(
    fake: LiveServer, open_page: OpenPage, tmp_path: Path
) -> None:
    pytest.importorskip("liffile")
    scan, stack = np.zeros((3, 2, 9), np.uint16), draw_square((3, 40, 48), 20).astype(np.uint16)
    name = "A stack with a name that is longer than two lines of a preview, as names with paths often are"
    path = write_lif(tmp_path / "a.lif", {"scan": ("ZTX", scan), name: ("ZYX", stack), "last": ("ZYX", stack[:2])})
    page = open_page(fake)
    choose_file(page, path.read_bytes(), "a.lif")

    expect(page.get_by_text("Select the scene to segment.")).to_be_visible()
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_disabled()
    # The first scene is not supported, so the second one is shown as an example.
    expect(get_size(page)).to_have_text("Size48 × 40 × 3")
    expect(page.locator("#scene")).to_have_value("")
    preview = get_previews(page).nth(1)
    expect(preview).to_have_attribute("title", name)
    assert preview.bounding_box()["height"] < 130
    preview.click()
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()


def read_pixels(content: bytes) -> NDArray[Any]:
    return np.asarray(tifffile.imread(io.BytesIO(content)))
