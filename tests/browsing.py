"""Browser settings and page actions shared by tests of the web UI."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page, expect

# The shell does not draw a window around the page, and needs less CPU time.
CHROMIUM_PATH = shutil.which("chromium-headless-shell") or shutil.which("chromium")
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync",
             # The first two load a hidden page for every browser context, which takes as much CPU time as the web UI.
             # The others are those that Playwright disables, because only the last switch takes effect.
             "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,AvoidUnnecessaryBeforeUnloadCheckSync,"
             "DestroyProfileOnBrowserClose,HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,MediaRouter,PaintHolding,"
             "ThirdPartyStoragePartitioning,OptimizationHints,NetworkTimeServiceQuerying")  # fmt: skip
AXE_SCRIPT = ROOT / "node_modules" / "axe-core" / "axe.min.js"
TIMEOUT_SECONDS = 60

# Turns the mouse wheel by one step. Returns how long drawing took, in milliseconds.
TURN_WHEEL = """async turn => {
  const stage = document.querySelector(".view[data-axis=z] .stage");
  performance.clearMeasures();
  stage.dispatchEvent(new WheelEvent("wheel", { deltaY: turn % 2 ? -100 : 100, bubbles: true, cancelable: true }));
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.getEntriesByName("draw").reduce((sum, entry) => sum + entry.duration, 0);
}"""

OpenPage = Callable[..., Page]


def read_measurement(name: str) -> str:
    """Return an expression that measures corrections of many objects with a script in tests/page."""
    script, boxes = ((Path(__file__).parent / "page" / file).read_text("utf-8") for file in (name, "labeled_boxes.js"))
    return f"({script})({boxes})"


def choose_file(page: Page, content: bytes, name: str = "cells.tif") -> None:
    page.set_input_files("#file", {"name": name, "mimeType": "image/tiff", "buffer": content})


def press_segment(page: Page) -> None:
    page.get_by_role("button", name="Segment", exact=True).click()


def central_voxel(labels: NDArray[Any], label: int) -> tuple[int, int, int]:
    """Return the voxel of an object that is nearest to its centroid."""
    voxels = np.argwhere(labels == label)
    z, y, x = voxels[np.argmin(((voxels - voxels.mean(0)) ** 2).sum(1))]
    return int(z), int(y), int(x)


def open_correct_tab(page: Page) -> None:
    page.get_by_role("tab", name="Correct").click()
    expect(page.get_by_role("button", name="Merge")).to_be_visible()


def go_to(page: Page, voxel: tuple[int, int, int]) -> None:
    for axis, position in zip("zyx", voxel, strict=True):
        page.get_by_label(f"Plane along {axis}").fill(str(position))


def find_crosshair(page: Page) -> tuple[float, float]:
    """Return the screen position of the crosshair in the XY view."""
    view = page.locator(".view[data-axis=z]")
    vertical, horizontal = view.locator(".crosshair.vertical"), view.locator(".crosshair.horizontal")
    # The crosshair moves in the next frame.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    vertical_box, horizontal_box = vertical.bounding_box(), horizontal.bounding_box()
    assert vertical_box is not None
    assert horizontal_box is not None
    return vertical_box["x"] + vertical_box["width"] / 2, horizontal_box["y"] + horizontal_box["height"] / 2


def drag(page: Page, path: list[tuple[float, float]]) -> None:
    page.mouse.move(*path[0])
    page.mouse.down()
    for point in path[1:]:
        page.mouse.move(*point)
    page.mouse.up()


def download(page: Page, button: str) -> bytes:
    with page.expect_download() as download_info:
        page.get_by_role("button", name=button, exact=True).click()
    return Path(download_info.value.path()).read_bytes()


def export_labels(page: Page) -> NDArray[Any]:
    labels: NDArray[Any] = np.load(io.BytesIO(download(page, "NumPy")))
    return labels


def check_accessibility(page: Page) -> None:
    """Assert that axe-core reports no accessibility violations in the dark and the light theme."""
    if not AXE_SCRIPT.exists():
        return
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT.read_text(encoding="utf-8"))
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        violations = page.evaluate("axe.run().then(run => run.violations.map(v => v.id + ' ' + v.nodes[0].html))")
        assert violations == [], f"{scheme}: {violations}"
