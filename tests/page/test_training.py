"""Tests of training from the web UI, with a real service and real training runs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import numpy as np
import pytest
from browsing import OpenPage, central_voxel, check_accessibility, find_crosshair, go_to, press_segment
from live import LiveServer, as_tiff, eager_settings, serve
from model_files import copy_model
from playwright.sync_api import Route, expect

from scripts.recipes.synthetic_nuclei import synthesize
from service.models.spec import ModelSpec

TRAINING = {"edge": 16, "batch_size": 1, "pool": 2, "learning_rate": 0.01}
# Returns the color of a marker of the second line, and the color of the line in the legend.
READ_LINE_COLORS = """() => {
  const legendEntry = document.querySelector(".curve [data-line='1']");
  const canvas = legendEntry.closest(".curve").querySelector("canvas"), { width, height } = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const legend = getComputedStyle(legendEntry, "::before").backgroundColor.match(/\\d+/g).slice(0, 3).map(Number);
  const distance = offset => Math.max(...legend.map((value, channel) => Math.abs(value - data[offset + channel])));
  const opaque = [...Array(width * height).keys()].map(pixel => 4 * pixel).filter(offset => data[offset + 3] === 255);
  const nearest = opaque.reduce((best, offset) => (distance(offset) < distance(best) ? offset : best));
  return [[...data.slice(nearest, nearest + 3)], legend];
}"""
NPY_HEADERS = {"Content-Type": "application/x-npy"}


@pytest.fixture(scope="module")
def live(trainable_model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a service with two small trainable models and two annotated stacks of the same image."""
    models = tmp_path_factory.mktemp("models")
    for name in ("random-nuclei", "others"):
        copy_model(trainable_model.folder, models / name)
    jobs = {"folder": tmp_path_factory.mktemp("service")}
    settings = eager_settings(
        models,
        models={"default": "random-nuclei"},
        jobs=jobs,
        training=TRAINING,
        trainings={"niceness": 0, "keep_worse": True},
    )
    with serve(settings) as service:
        image, labels = synthesize(np.random.default_rng(0), (16, 32, 48))
        stack = service.post("/stacks", as_tiff(image)).json()["id"]
        np.save(array := io.BytesIO(), labels)
        for name in ("first try", "nuclei by hand"):
            assert (
                service.post("/annotations", array.getvalue(), NPY_HEADERS, stack=stack, name=name).status_code == 201
            )
        yield service


def test_model_is_trained_used_and_deleted(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(live)
    page.get_by_role("button", name="Improve a model with these stacks").click()
    dialog = page.get_by_role("dialog")
    stack_boxes = dialog.get_by_role("group", name="Annotated stacks").get_by_role("checkbox")
    expect(stack_boxes).to_have_count(2)
    newest_box, older_box = stack_boxes.all()
    expect(newest_box).to_be_checked()
    expect(older_box).not_to_be_checked()
    expect(dialog).to_contain_text("same region as nuclei by hand; select only one of them")
    older_box.check()
    expect(newest_box).not_to_be_checked()
    newest_box.check()
    expect(older_box).not_to_be_checked()
    expect(dialog.get_by_label("Name of the new model")).to_have_value("random-nuclei-2")
    check_accessibility(page)
    dialog.get_by_label("Name of the new model").fill("random-nuclei")
    dialog.get_by_label("Training time in minutes").fill("0.03")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog).to_contain_text("another name")
    dialog.get_by_label("Name of the new model").fill("mine")
    with page.expect_request(lambda request: request.url.endswith("/trainings") and request.method == "POST") as sent:
        dialog.get_by_role("button", name="Start").click()
    # The request is the same as one with curl, so both train alike.
    newest = live.client.get("/annotations").json()["annotations"][0]["id"]
    expected = {"model": "random-nuclei", "annotations": [newest], "minutes": 0.03, "name": "mine", "partial": False}
    assert sent.value.post_data_json == expected
    training = page.get_by_role("region", name="Training")
    expect(training).to_contain_text("mine is ready")
    report = live.client.get("/trainings").json()["trainings"][0]
    expect(training).to_contain_text(hide_scores(report["message"]))
    new_model = training.locator(".scores > div").last
    expect(new_model.locator("dd")).to_have_text(re.compile(r"^\d+ of \d+ objects? correct, \d+ false$"))
    expect(new_model).to_have_attribute("title", re.compile(f"^F1 {report['after']:.2f} at IoU 0.5"))
    curve = training.get_by_role("img", name="Error (loss) after")
    assert f"training {report['loss'][-1][1]:.3g}"[:12] in (curve.get_attribute("aria-label") or "")
    for _ in range(2):
        line_color, legend_color = page.evaluate(READ_LINE_COLORS)
        assert max(abs(a - b) for a, b in zip(line_color, legend_color, strict=True)) <= 2
        page.get_by_role("button", name="Switch between dark and light").click()
    check_accessibility(page)
    training.get_by_role("button", name="Open the stack with mine").click()
    expect(page.locator("#settings .properties")).to_contain_text("48 × 32 × 16")
    press_segment(page)
    expect(page.locator("#side")).to_contain_text("mine/1")
    page.get_by_role("button", name="New stack").click()
    trainings = page.get_by_role("region", name="Training runs")
    expect(trainings).to_contain_text("mine is ready")
    trainings.get_by_role("link").click()
    expect(training).to_contain_text("mine is ready")
    page.once("dialog", lambda dialog: dialog.accept())
    training.get_by_role("button", name="Delete the model").click()
    expect(training).to_contain_text("The model mine was deleted")
    expect(training).not_to_contain_text("is ready")
    assert live.client.get("/models/mine").status_code == 404
    page.get_by_role("button", name="New stack").click()
    expect(trainings).to_contain_text("The model mine was deleted")
    trainings.get_by_role("link").click()
    expect(training).to_contain_text("The model mine was deleted")
    page.get_by_role("link", name="Status").click()
    max_models = live.runtime.settings.trainings.models
    expect(page.get_by_role("region", name="Training")).to_contain_text(
        f"2 annotated stacks, 0 of at most {max_models} trained"
    )


def hide_scores(message: str) -> str:
    """Return the message of a training run as the web UI displays it, without the counts and scores."""
    return re.sub(r": before training, .*\(.*; after training, .*?\)", "", message)


def test_stacks_labeled_by_another_model_family_are_not_preselected(live: LiveServer, open_page: OpenPage) -> None:
    stack = live.client.get("/annotations").json()["annotations"][0]["stack"]
    job = live.run(b"", stack=stack, model="others")
    labels = live.result(job, Accept="application/x-npy").content
    annotation = live.post("/annotations", labels, NPY_HEADERS, job=job["id"], name="other objects").json()["id"]
    page = open_page(live)
    page.get_by_role("button", name="Improve a model with these stacks").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("combobox", name="Base model").select_option("others")
    other_box, nuclei_box = (
        dialog.get_by_role("checkbox", name=re.compile(name)) for name in ("^other", "^nuclei by hand")
    )
    expect(other_box).to_be_checked()
    expect(dialog.get_by_label("Name of the new model")).to_have_value("others-2")
    dialog.get_by_role("combobox", name="Base model").select_option("random-nuclei")
    expect(other_box).not_to_be_checked()
    expect(nuclei_box).to_be_checked()
    live.client.delete(f"/annotations/{annotation}")


def test_training_is_stopped(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(live)
    page.get_by_role("button", name="Improve a model with these stacks").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name of the new model").fill("stopped")
    dialog.get_by_label("What the new model learns").select_option("affinities")
    with page.expect_request(lambda request: request.url.endswith("/trainings") and request.method == "POST") as sent:
        dialog.get_by_role("button", name="Start").click()
    assert sent.value.post_data_json["target"] == "affinities"
    page.get_by_role("button", name="Stop the training").click()
    expect(page.get_by_role("region", name="Training")).to_contain_text("The training was stopped")
    assert live.client.get("/models/stopped").status_code == 404


def test_training_without_improvement_leads_back_to_the_annotation(live: LiveServer, open_page: OpenPage) -> None:
    newest = live.client.get("/annotations").json()["annotations"][0]["id"]
    request = {"model": "random-nuclei", "annotations": [newest], "minutes": 0.03, "name": "worse"}
    run = live.client.post("/trainings", json=request).json()["id"]
    message = "The new model is not better. Train again with diameter=2,4,4um."
    outcome = {"state": "done", "better": False, "model": None, "message": message}

    def replace_outcome(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), **outcome})

    page = open_page(live)
    page.route(f"**/trainings/{run}", replace_outcome)
    page.goto(f"/#training={run}")
    training = page.get_by_role("region", name="Training")
    expect(training).to_contain_text("Train again with “Object diameter: 4 × 4 × 2 µm”.")
    check_accessibility(page)
    training.get_by_role("link", name="Continue the annotation").click()
    expect(page.locator(".correct")).to_contain_text("loaded from the server")
    live.client.delete(f"/trainings/{run}")


def test_training_starts_with_a_stack_annotated_from_nothing(live: LiveServer, open_page: OpenPage) -> None:
    image, labels = synthesize(np.random.default_rng(1), (16, 32, 48))
    stack = live.post("/stacks", as_tiff(image)).json()["id"]
    page = open_page(live)
    page.goto(f"/#stack={stack}")
    page.get_by_role("button", name="Annotate by hand").click()
    page.get_by_label("Paint across planes").check()
    ids = [int(label) for label in np.unique(labels)[1:]]
    for label in ids:
        go_to(page, central_voxel(labels, label))
        page.mouse.click(*find_crosshair(page))
    object_count = int(re.sub(r"\D.*", "", page.locator(".correct").get_by_text("painted").inner_text()))
    assert len(ids) / 2 < object_count <= len(ids)
    page.get_by_label("The whole stack").check()
    page.get_by_role("button", name="Train a model").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("from nothing")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("heading")).to_have_text("Improve a model")
    box = dialog.get_by_role("checkbox", name=re.compile("^from nothing"))
    expect(box).to_be_checked()
    for other in dialog.get_by_role("group", name="Annotated stacks").get_by_role("checkbox").all()[1:]:
        other.uncheck()
    dialog.get_by_label("Name of the new model").fill("hand-made")
    dialog.get_by_role("button", name="Start").click()
    page.get_by_role("button", name="Stop the training").click()
    expect(page.get_by_role("region", name="Training")).to_contain_text("The training was stopped")
    report = live.client.get("/trainings").json()["trainings"][0]
    annotation = live.client.get(f"/annotations/{report['annotations'][0]}").json()
    assert (annotation["objects"], annotation["stack"], len(report["annotations"])) == (object_count, stack, 1)
    live.client.delete(f"/annotations/{annotation['id']}")
