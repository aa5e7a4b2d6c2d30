"""A stack of 300 MB on the page, from its file to its labels, in a real browser."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from browsing import WHEEL, Open, segment
from live import Live
from playwright.sync_api import Page, expect

SHAPE = (150, 1024, 1024)
SECONDS = 300
# What the views hold: no more of the stack travels to the browser, nor of its labels.
MOST_BYTES = 110_000_000
FRAME_MILLISECONDS = 16


def write_stack(path: Path) -> None:
    """Write noise with a bright ball in every 64 voxels, uint16."""
    z, y, x = (np.arange(length) % 64 - 32 for length in SHAPE)
    rng = np.random.default_rng(0)
    across = y[:, None] ** 2 + x**2
    with tifffile.TiffWriter(path, imagej=True) as file:
        pages = (rng.integers(0, 90, SHAPE[1:], np.uint16) + 400 * (across + plane**2 < 400) for plane in z)
        stack = np.stack([page.astype(np.uint16) for page in pages])
        file.write(stack, metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um"}, resolution=(5.0, 5.0))


def tell(page: Page, began: float, what: str) -> None:
    heap = page.evaluate("() => performance.memory.usedJSHeapSize")
    print(f"{what} after {time.monotonic() - began:.1f} s, {heap / 1e6:.0f} MB of the page's memory")


@pytest.mark.thorough
def test_a_stack_of_300_mb_is_looked_at_segmented_and_taken(fake: Live, open_page: Open, tmp_path: Path) -> None:
    write_stack(stack := tmp_path / "large.tif")
    assert stack.stat().st_size > 300_000_000
    page = open_page(fake, accept_downloads=True)
    page.set_default_timeout(1000 * SECONDS)
    sizes: list[int] = []
    page.on("response", lambda told: "/planes" in told.url and sizes.append(int(told.headers["content-length"])))
    began = time.monotonic()
    page.set_input_files("#file", stack)
    expect(page.get_by_role("progressbar", name="Upload")).to_be_visible()
    expect(page.locator("#settings .facts")).to_contain_text("1024 × 1024 × 150", timeout=1000 * SECONDS)
    tell(page, began, "Understood")
    expect(page.locator(".caption").first).to_contain_text("/ 150", timeout=1000 * SECONDS)
    tell(page, began, "First planes")
    expect(page.locator(".waiting")).to_be_empty(timeout=1000 * SECONDS)
    tell(page, began, "All of the stack in view")
    drawn = sorted(page.evaluate(WHEEL, turn) for turn in range(21))
    print(f"Next plane: median {drawn[10]:.1f} ms")
    assert drawn[2] < FRAME_MILLISECONDS
    segment(page)
    expect(page.locator("#words")).to_contain_text("classes", timeout=1000 * SECONDS)
    expect(page.locator(".waiting")).to_be_empty(timeout=1000 * SECONDS)
    tell(page, began, "Segmented")
    print(f"{sum(sizes) / 1e6:.0f} MB of planes in {len(sizes)} answers")
    assert sum(sizes) < MOST_BYTES
    page.get_by_role("tab", name="Take").click()
    with page.expect_download(timeout=1000 * SECONDS) as downloading:
        page.get_by_role("button", name="Labels, OME-TIFF").click()
    taken = tifffile.imread(downloading.value.path())
    tell(page, began, "Taken")
    job = fake.client.get("/jobs").json()["jobs"][0]
    answer = fake.result(job, Accept="image/tiff")
    assert np.array_equal(taken, tifffile.imread(io.BytesIO(answer.content)))
    assert np.array_equal(taken[32], tifffile.imread(stack, key=32) > 100)
