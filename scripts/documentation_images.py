"""Create the images in this repository: screenshots of the web UI, and one example image per bundled model.

Usage: python scripts/documentation_images.py    # requires `chromium` on the PATH, and the extras dev and demo
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from service.core.types import Segmentation, Selection
from service.formats import stack_reader, writers

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MAX_PIXEL_BYTES = 2**30
TIMEOUT_SECONDS = 300
VIEWPORT: ViewportSize = {"width": 1280, "height": 760}


def draw_models() -> None:
    """Write an image of each bundled model: the middle plane of its sample with the expected outlines."""
    for folder in sorted((ROOT / "models").iterdir()):
        volume = stack_reader.read(folder / "sample.tif", Selection(), MAX_PIXEL_BYTES, None)
        labels = stack_reader.read(folder / "expected.tif", Selection(), MAX_PIXEL_BYTES, None).read_all()[0]
        save_png(writers.draw_thumbnail(volume, Segmentation(labels, "labels")), folder / "example.png")


def save_png(picture: bytes, path: Path) -> None:
    """Write an image as a PNG with at most 256 colors. The file is a third as large and looks the same."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)
    sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes\n")


@contextmanager
def run_service() -> Iterator[str]:
    """Run the service with the bundled models and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        command = [sys.executable, "-m", "service", "serve", "--port", port, "--models", str(ROOT / "models")]
        folders = {"TMPDIR": folder, "STACKSEG_JOBS__FOLDER": f"{folder}/jobs"}
        environment = os.environ | folders | {"PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=folder, env=environment)  # noqa: S603 - this Python interpreter
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/")
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            server.wait()


def wait_until_ready(address: str) -> None:
    """Wait until the service is ready. Raises TimeoutError after `TIMEOUT_SECONDS` attempts, one per second."""
    for _ in range(TIMEOUT_SECONDS):
        try:
            urllib.request.urlopen(f"{address}health/ready").close()  # noqa: S310 - the local service
        except OSError:
            time.sleep(1)
        else:
            return
    raise TimeoutError(address)


def draw_result(page: Page) -> None:
    """Segment the sample, hide objects at the border, select the largest, and capture the page with the 3D view."""
    page.get_by_role("button", name="Try the sample").click()
    run_segmentation(page)
    page.get_by_label("Whole objects only").check()
    page.get_by_role("button", name="Vol. µm³").click()
    page.locator("tr[data-row]").first.click()
    page.get_by_role("button", name="3D").click()
    page.wait_for_timeout(1500)
    save_png(page.screenshot(), IMAGES / "page.png")


def draw_comparison(page: Page) -> None:
    """Segment the sample with a different object diameter, and capture both results side by side."""
    page.get_by_role("button", name="Show all").click()
    page.get_by_label("How the object diameter is determined").select_option("px")
    page.get_by_label("Object diameter in voxels").fill("40")
    page.get_by_label("Object diameter in voxels").press("Tab")
    page.wait_for_timeout(1000)
    run_segmentation(page)
    page.get_by_role("link", name="Side by side").click()
    expect(page.locator("#compare footer")).to_contain_text("in both")
    page.locator(".side-by-side .view[data-axis=z] .stage").first.click(position={"x": 112, "y": 144})
    page.wait_for_timeout(500)
    save_png(page.screenshot(), IMAGES / "compare.png")


def draw_gallery(page: Page) -> None:
    """Try the models on the sample, and capture the gallery."""
    page.get_by_role("button", name="Try the sample").click()
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()
    page.get_by_role("button", name="Compare the models").click()
    page.get_by_role("button", name="Try on my stack").click()
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("Highest confidence")
    save_png(page.screenshot(), IMAGES / "gallery.png")


def draw_ambiguous_stack(page: Page) -> None:
    """Open a stack with unknown axes and several channels, and capture the settings that resolve them."""
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[16:32]
    other = sample[:, ::-1] // 3
    tifffile.imwrite(stack := io.BytesIO(), np.stack([sample, other], 1), metadata={"axes": "QRYX"})
    page.set_input_files("#file", {"name": "export.tif", "mimeType": "image/tiff", "buffer": stack.getvalue()})
    page.get_by_role("button", name="ZCYX", exact=True).click()
    page.locator("button.preview").first.click()
    page.get_by_role("group", name="Displayed channels").get_by_role("button", name="Channel 2").click()
    page.wait_for_timeout(1500)
    save_png(page.screenshot(), IMAGES / "ambiguous.png")


def draw_batch(page: Page) -> None:
    """Segment parts of the samples as a batch, together with a truncated file, and capture the list."""
    nuclei, embryos = (tifffile.imread(ROOT / "models" / name / "sample.tif") for name in ("nuclei", "embryos"))
    contents = {
        "control_01.tif": encode_stack(nuclei[8:40, :128, :128]),
        "control_02.tif": encode_stack(nuclei[8:40, 64:, 64:]),
        "treated_01.tif": encode_stack(nuclei[8:40, 64:, :128])[:400_000],
        "treated_02.tif": encode_stack(embryos[:32, :128, :128]),
    }
    files = [{"name": name, "mimeType": "image/tiff", "buffer": content} for name, content in contents.items()]
    page.set_input_files("#file", files)
    page.get_by_role("button", name="Segment 3 stacks").click()
    expect(page.locator(".batch-list [data-phase=done]")).to_have_count(3)
    page.wait_for_timeout(3000)
    save_png(page.screenshot(), IMAGES / "batch.png")


def encode_stack(pixels: NDArray[Any]) -> bytes:
    """Return an ImageJ hyperstack with voxels of 0.5 x 0.2 x 0.2 um."""
    file = io.BytesIO()
    metadata = {"axes": "ZYX", "spacing": 0.5, "unit": "um"}
    tifffile.imwrite(file, pixels, imagej=True, metadata=metadata, resolution=(5.0, 5.0))
    return file.getvalue()


def run_segmentation(page: Page) -> None:
    """Press "Segment" and wait for the result."""
    page.get_by_role("button", name="Segment", exact=True).click()
    expect(page.get_by_role("heading", name="Segmenting")).to_be_visible()
    expect(page.locator("#summary")).to_contain_text("objects, median diameter")


def draw_page() -> None:
    """Write the screenshots of the web UI."""
    chromium = shutil.which("chromium")
    expect.set_options(timeout=1000 * TIMEOUT_SECONDS)
    with run_service() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport=VIEWPORT, color_scheme="dark").new_page()
        page.goto(address)
        draw_result(page)
        draw_comparison(page)
        page.goto(address)
        draw_ambiguous_stack(page)
        page.goto(address)
        draw_gallery(page)
        page.goto(address)
        draw_batch(page)
        browser.close()


if __name__ == "__main__":
    draw_models()
    draw_page()
