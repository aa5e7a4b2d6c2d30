"""End-to-end test of the web UI with a 300 MB stack, from the upload to the exported labels."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from browsing import TURN_WHEEL, OpenPage, press_segment
from live import LiveServer
from playwright.sync_api import Page, expect

SHAPE = (150, 1024, 1024)
TIMEOUT_SECONDS = 300
# Maximum size of all image and label planes that the browser downloads.
MAX_DOWNLOADED_BYTES = 110_000_000
MAX_FRAME_MILLISECONDS = 16


def write_stack(path: Path) -> None:
    """Write a uint16 stack that contains noise and a bright ball every 64 voxels."""
    z, y, x = (np.arange(length) % 64 - 32 for length in SHAPE)
    rng = np.random.default_rng(0)
    squared_distances = y[:, None] ** 2 + x**2
    with tifffile.TiffWriter(path, imagej=True) as file:
        pages = (rng.integers(0, 90, SHAPE[1:], np.uint16) + 400 * (squared_distances + plane**2 < 400) for plane in z)
        stack = np.stack([page.astype(np.uint16) for page in pages])
        file.write(stack, metadata={"axes": "ZYX", "spacing": 0.5, "unit": "um"}, resolution=(5.0, 5.0))


def print_progress(page: Page, start: float, step: str) -> None:
    heap = page.evaluate("() => performance.memory.usedJSHeapSize")
    print(f"{step} after {time.monotonic() - start:.1f} s, {heap / 1e6:.0f} MB of JavaScript memory")


@pytest.mark.thorough
def test_300_mb_stack_is_viewed_segmented_and_exported(fake: LiveServer, open_page: OpenPage, tmp_path: Path) -> None:
    write_stack(stack := tmp_path / "large.tif")
    assert stack.stat().st_size > 300_000_000
    page = open_page(fake, accept_downloads=True)
    page.set_default_timeout(1000 * TIMEOUT_SECONDS)
    response_sizes: list[int] = []
    page.on(
        "response",
        lambda response: "/planes" in response.url and response_sizes.append(int(response.headers["content-length"])),
    )
    start = time.monotonic()
    page.set_input_files("#file", stack)
    expect(page.get_by_role("progressbar", name="Upload")).to_be_visible()
    expect(page.locator("#settings .properties")).to_contain_text("1024 × 1024 × 150", timeout=1000 * TIMEOUT_SECONDS)
    print_progress(page, start, "Metadata shown")
    expect(page.locator(".caption").first).to_contain_text("/ 150", timeout=1000 * TIMEOUT_SECONDS)
    print_progress(page, start, "First planes shown")
    expect(page.locator(".fetch-status")).to_be_empty(timeout=1000 * TIMEOUT_SECONDS)
    print_progress(page, start, "Whole stack loaded")
    durations = sorted(page.evaluate(TURN_WHEEL, turn) for turn in range(21))
    print(f"Next plane: median {durations[10]:.1f} ms")
    assert durations[2] < MAX_FRAME_MILLISECONDS
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("classes", timeout=1000 * TIMEOUT_SECONDS)
    expect(page.locator(".fetch-status")).to_be_empty(timeout=1000 * TIMEOUT_SECONDS)
    print_progress(page, start, "Segmented")
    print(f"{sum(response_sizes) / 1e6:.0f} MB of planes in {len(response_sizes)} responses")
    assert sum(response_sizes) < MAX_DOWNLOADED_BYTES
    page.get_by_role("tab", name="Export").click()
    with page.expect_download(timeout=1000 * TIMEOUT_SECONDS) as download_info:
        page.get_by_role("button", name="Labels (OME-TIFF)").click()
    exported_labels = tifffile.imread(download_info.value.path())
    print_progress(page, start, "Exported")
    job = fake.client.get("/jobs").json()["jobs"][0]
    answer = fake.result(job, Accept="image/tiff")
    assert np.array_equal(exported_labels, tifffile.imread(io.BytesIO(answer.content)))
    assert np.array_equal(exported_labels[32], tifffile.imread(stack, key=32) > 100)
