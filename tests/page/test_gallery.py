"""Tests of the gallery of models in the web UI: descriptions of the models, and trials on a part of the stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from browsing import OpenPage, check_accessibility, choose_file
from fakes import FakeSegmenter, FakeSegmenterFactory
from live import STACK, LiveServer, as_tiff, eager_settings, serve
from model_files import copy_model
from numpy.typing import NDArray
from paths import ROOT
from playwright.sync_api import Locator, Page, expect

from service.core.errors import BadParameter

CHOOSE_BOX = """async cases => {
  const { chooseBox } = await import("/page/gallery/crop.js");
  return cases.map(([shape, center]) => chooseBox(shape, center)).map(({ start, shape }) => [start, shape]);
}"""
# Fetches a part of a stack, and uploads it as a stack. Returns the id of the new stack.
COPY_BOX = """async ([stack, parameters, start, shape]) => {
  const { requestJson, uploadStack } = await import("/page/core/requests.js");
  const { encodeCrop, fetchCrop } = await import("/page/gallery/crop.js");
  const { file } = await requestJson(`inspect?stack=${stack}`, { method: "POST" });
  const signal = new AbortController().signal;
  const { channels, channelNames } =
    await fetchCrop(stack, file, parameters, 0, { start, shape }, signal, () => {});
  const content = encodeCrop(channels, channelNames, shape, file.voxel_size);
  return (await uploadStack(content, "part.tif", () => {})).id;
}"""


def open_gallery(page: Page, content: bytes) -> None:
    """Open the gallery for a stack that is segmented at its original resolution."""
    choose_file(page, content)
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name="Compare the models").click()


def find_card(page: Page, model: str) -> Locator:
    return page.locator(".gallery-card").filter(has=page.get_by_role("heading", name=model, exact=True))


def test_models_are_tried_on_the_stack_and_one_segments_it(nuclei: LiveServer, open_page: OpenPage) -> None:
    sample = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[12:36, 60:124, 40:104]
    content, page = as_tiff(sample), open_page(nuclei)
    open_gallery(page, content)
    expect(page.get_by_role("img", name="Objects that membranes finds in its sample")).to_be_visible()
    expect(find_card(page, "nuclei")).to_contain_text("objects about 20 voxels wide")
    link = find_card(page, "nuclei").get_by_role("link", name="Tokuoka")
    expect(link).to_have_attribute("href", "https://doi.org/10.1038/s41540-020-00152-8")
    check_accessibility(page)
    page.get_by_role("button", name="Try on my stack").click()
    status = page.get_by_role("dialog").get_by_role("status")
    confidences = {}
    for model in ("nuclei", "membranes"):
        response = nuclei.post("/segment", content, model=model, diameter="none")
        count, confidence = (response.headers[f"X-StackSeg-{name}"] for name in ("Objects", "Confidence"))
        text = f"{count} object{'s' * (count != '1')}, confidence {round(100 * float(confidence))}%"
        expect(find_card(page, model)).to_contain_text(text)
        confidences[model] = float(confidence)
    best = max(confidences, key=lambda model: confidences[model])
    expect(status).to_contain_text(f"Highest confidence: {best}")
    expect(find_card(page, best)).to_have_class("gallery-card best")
    page.get_by_role("slider", name="Plane", exact=True).press("ArrowLeft")
    check_accessibility(page)
    page.get_by_role("button", name="Segment the stack with membranes").click()
    expect(page.locator("#summary")).to_contain_text("object")
    job = nuclei.client.get("/jobs").json()["jobs"][0]
    assert job["parameters"]["model"] == "membranes"
    expect(page.locator("select:has(option[value=membranes])")).to_have_value("membranes")
    assert job["doubt"]
    page.get_by_role("button", name="Compare the models").first.click()
    page.get_by_role("button", name="Try on my stack").click()
    expect(status).to_contain_text("Highest confidence: nuclei")
    expect(status).to_contain_text("Not counting membranes, with low confidence in the whole stack.")
    expect(find_card(page, "nuclei")).to_have_class("gallery-card best")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Models", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_failed_trial_does_not_stop_the_others_and_a_trial_can_be_canceled(
    bands_repository: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    names = ("bands", "broken", "slow")
    for name in names:
        copy_model(bands_repository / "bands", tmp_path / "models" / name, authors=["A. Tester"])
    problem = BadParameter("broken needs 2 channels, but the volume has 1.")

    def prepare(fake: FakeSegmenter) -> None:
        if fake.spec.name == "broken":
            fake.warm_up = lambda **_: setattr(fake, "error", problem)  # type: ignore[method-assign]

    fakes = FakeSegmenterFactory(prepare)
    settings = eager_settings(tmp_path / "models", models={"load": "all"})
    with serve(settings, load=fakes) as live:  # type: ignore[arg-type]
        page = open_page(live)
        open_gallery(page, STACK)
        expect(find_card(page, "slow")).to_contain_text("No picture: the model has no sample.")
        expect(find_card(page, "slow")).to_contain_text("A. Tester")
        (slow,) = (fake for fake in fakes if fake.spec.name == "slow")
        slow.gate.clear()
        page.get_by_role("button", name="Try on my stack").click()
        expect(find_card(page, "bands")).to_contain_text("Classes, not objects, no confidence")
        expect(find_card(page, "broken")).to_contain_text(str(problem))
        expect(find_card(page, "slow")).to_contain_text("Segmenting")
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("dialog").get_by_role("status")).to_have_text("Canceled")
        expect(find_card(page, "slow")).to_contain_text("Canceled")
        expect(find_card(page, "bands")).to_contain_text("Classes, not objects")
        slow.gate.set()
        page.get_by_role("button", name="Try on my stack").click()
        expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("1 model cannot segment it")
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        page.get_by_role("button", name="New stack").click()
        page.get_by_role("button", name="Models", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("Open a stack to try the models on it.")


def test_part_is_as_large_as_possible_and_around_the_center(module_page: Page) -> None:
    shapes = [(5, 40, 60), (26, 1116, 627), (2000, 1800, 1900), (1, 9000, 9000), (3000, 20, 30)]
    centers = [tuple(int(fraction * (length - 1)) for length in shape) for shape in shapes for fraction in (0, 0.4, 1)]
    cases = list(zip(np.repeat(shapes, 3, axis=0).tolist(), centers, strict=True))
    for (full_shape, center), (start, shape) in zip(cases, module_page.evaluate(CHOOSE_BOX, cases), strict=True):
        assert np.prod(shape) <= 4_000_000
        # One more voxel along the shortened edges would exceed the limit.
        edge = max(shape)
        assert shape == [min(length, edge) for length in full_shape]
        assert shape == full_shape or np.prod([min(length, edge + 1) for length in full_shape]) > 4_000_000
        assert all(
            0 <= first <= middle < first + length <= total
            for first, middle, length, total in zip(start, center, shape, full_shape, strict=True)
        )


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32"])
@pytest.mark.parametrize(
    ("start", "shape"), [((2, 0, 0), (3, 20, 30)), ((0, 7, 3), (8, 5, 25)), ((0, 1, 22), (8, 18, 4))]
)
def test_part_has_the_pixels_channels_and_voxel_size_of_the_stack(
    fake: LiveServer, module_page: Page, dtype: str, start: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    pixels: NDArray[Any] = np.random.default_rng(0).integers(0, 100, (8, 2, 20, 30)).astype(dtype)
    metadata = {"axes": "ZCYX", "Channel": {"Name": ["<a> & b", "c"]}}
    sizes = {f"PhysicalSize{axis}": size for axis, size in zip("ZYX", (0.5, 0.25, 0.2), strict=True)}
    content = as_tiff(pixels, imagej=False, ome=True, resolution=None, metadata=metadata | sizes)
    stack = fake.post("/stacks", content).json()["id"]
    box = tuple(slice(first, first + length) for first, length in zip(start, shape, strict=True))
    for parameters, channels in (({}, (0, 1)), ({"channel": "c"}, (1,))):
        part = module_page.evaluate(COPY_BOX, [stack, parameters, start, shape])
        file = fake.client.post("/inspect", params={"stack": part}).json()["file"]
        assert file["shape"][1:] == list(shape)
        assert file["dtype"] == dtype
        assert file["voxel_size"] == {"z": 0.5, "y": 0.25, "x": 0.2}
        assert len(file["channels"]) == len(channels)
        for index, channel in enumerate(channels):
            planes = fake.client.get(f"/stacks/{part}/planes", params={"channel": str(index)}).content
            assert np.array_equal(np.frombuffer(planes, dtype).reshape(shape), pixels[:, channel][box])
