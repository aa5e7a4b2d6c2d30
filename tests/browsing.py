"""Browser settings and page actions shared by tests of the web UI."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Page

CHROMIUM_PATH = shutil.which("chromium")
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
AXE_SCRIPT = ROOT / "node_modules" / "axe-core" / "axe.min.js"
TIMEOUT_SECONDS = 60

# Turns the mouse wheel by one step. Returns how long drawing took, in milliseconds.
TURN_WHEEL = """async turn => {
  const stage = document.querySelector(".view[data-axis=z] .stage");
  performance.clearMeasures();
  stage.dispatchEvent(new WheelEvent("wheel", { deltaY: turn % 2 ? -1 : 1, bubbles: true, cancelable: true }));
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.getEntriesByName("draw").reduce((sum, entry) => sum + entry.duration, 0);
}"""

OpenPage = Callable[..., Page]


def choose_file(page: Page, content: bytes, name: str = "cells.tif") -> None:
    page.set_input_files("#file", {"name": name, "mimeType": "image/tiff", "buffer": content})


def press_segment(page: Page) -> None:
    page.get_by_role("button", name="Segment", exact=True).click()


def central_voxel(labels: NDArray[Any], label: int) -> tuple[int, int, int]:
    """Return the voxel of an object that is nearest to its centroid."""
    voxels = np.argwhere(labels == label)
    z, y, x = voxels[np.argmin(((voxels - voxels.mean(0)) ** 2).sum(1))]
    return int(z), int(y), int(x)


def check_accessibility(page: Page) -> None:
    """Assert that axe-core reports no accessibility violations in the dark and the light theme."""
    if not AXE_SCRIPT.exists():
        return
    page.evaluate(AXE_SCRIPT.read_text(encoding="utf-8"))
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        violations = page.evaluate("axe.run().then(run => run.violations.map(v => v.id + ' ' + v.nodes[0].html))")
        assert violations == [], f"{scheme}: {violations}"
