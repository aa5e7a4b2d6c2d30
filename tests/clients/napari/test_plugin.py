"""The widgets in napari with a real server. `make test-napari` runs these tests, which need a display.

SERVICE_PYTHON is the interpreter of the service, by default that of the clone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
napari = pytest.importorskip("napari")
sys.path[:0] = [str(ROOT / "clients" / "napari"), str(ROOT / "clients" / "python")]

import tifffile  # noqa: E402
from napari_stackseg import background, connection, files  # noqa: E402
from napari_stackseg.segment_widget import SegmentWidget  # noqa: E402
from napari_stackseg.segmentation import Segmentation  # noqa: E402
from napari_stackseg.training_widget import TrainingWidget  # noqa: E402
from qtpy.QtWidgets import QApplication  # noqa: E402
from stackseg_client import Client  # noqa: E402

SAMPLE = ROOT / "models" / "nuclei" / "sample.tif"


def wait_until(condition: Callable[[], Any], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        QApplication.processEvents()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the bundled model in another process."""
    folder = tmp_path_factory.mktemp("server")
    config, log = folder / "config.yaml", folder / "log"
    config.write_text(
        json.dumps({"models": {"serve": ["nuclei", "tissue"]}, "annotations": {"folder": str(folder / "kept")}})
    )
    # Jobs are not stored in the folders of the user, also if these tests run without conftest.py.
    environment = os.environ | {"XDG_STATE_HOME": str(folder)}
    python = os.environ.get("SERVICE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    command = [python, "-m", "service", "serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while "is ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        match = re.search(r"listens on (\S+)", log.read_text())
        assert match is not None
        yield match[1]
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def viewer(url: str) -> Iterator[Any]:
    connection.CONNECTION.url = url
    viewer = napari.Viewer(show=False)
    yield viewer
    viewer.close()


@pytest.fixture
def widget(viewer: Any) -> SegmentWidget:
    widget = SegmentWidget(viewer)
    viewer.window.add_dock_widget(widget)
    wait_until(widget.model.count)
    return widget


def segment(viewer: Any, widget: SegmentWidget) -> Any:
    count = len(viewer.layers)
    widget.segment()
    wait_until(lambda: len(viewer.layers) > count or "✗" in widget.message.text())
    assert len(viewer.layers) > count, widget.message.text()
    return viewer.layers[-1]


def drag_corner(viewer: Any, shapes: Any, factor: float) -> None:
    """Drag a corner of the selected shape with the mouse, so that both sides grow by a factor."""
    shown = list(viewer.dims.displayed)
    start, fixed = (np.array(shapes.data_to_world(shapes.data[0][corner])) for corner in (2, 0))
    end = fixed + factor * (start - fixed)

    def make_event(kind: str, position: Any) -> Any:
        names = {"type": kind, "position": position, "pos": position[shown], "modifiers": [], "button": 1}
        return SimpleNamespace(**names, is_dragging=kind == "mouse_move", view_direction=None, dims_displayed=shown)

    drag = shapes.mouse_drag_callbacks[0](shapes, event := make_event("mouse_press", start))
    next(drag)
    for position in (end, end):
        vars(event).update(vars(make_event("mouse_move", position)))
        next(drag)
    event.type = "mouse_release"
    assert list(drag) == []


def test_labels_have_the_place_and_the_measurements_of_their_image(viewer: Any, widget: SegmentWidget) -> None:
    widget.open_sample()
    wait_until(lambda: len(viewer.layers))
    image = viewer.layers[0]
    image.translate = (1, 2, 3)
    assert (widget.axes.currentText(), widget.voxel_size.text()) == ("ZYX", "0.5, 0.2, 0.2")
    assert not widget.picture.pixmap().isNull()
    labels = segment(viewer, widget)
    with Client(connection.CONNECTION.url) as client:
        expected = client.segment(SAMPLE, table=True)
    np.testing.assert_array_equal(labels.data, expected.labels)
    np.testing.assert_array_equal(labels.extent.world, image.extent.world)
    assert (labels.units, labels.axis_labels) == (image.units, image.axis_labels)
    assert list(labels.features["index"]) == list(np.unique(labels.data)[1:])
    assert "77 objects" in widget.message.text()
    assert widget.progress.value() == 100
    assert "diameter=" not in widget.message.text()
    # Confidence is high, so the message is a note and not a warning.
    assert "⚠" not in widget.message.text()


def test_measured_diameters_are_used(viewer: Any, widget: SegmentWidget) -> None:
    viewer.add_image(tifffile.imread(SAMPLE), scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    shapes = viewer.add_shapes(ndim=3, scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    widget.measure()
    assert "Found: nothing" in widget.message.text()
    shapes.add_lines(np.array([[[20, 50, 50], [20, 80, 90]]]))
    widget.measure()
    assert widget.diameter_value.text() == "10um"
    # A circle with a diameter of 20 voxels.
    shapes.add_ellipses(np.array([[[20, 50, 50], [20, 50, 70], [20, 70, 70], [20, 70, 50]]]))
    shapes.selected_data = {1}
    widget.measure()
    assert widget.diameter_value.text() == "4um"
    assert segment(viewer, widget).metadata["stackseg"]["parameters"]["diameter"] == "4um"
    assert "stated" in widget.message.text()


def test_threshold_and_minimum_size_are_used(viewer: Any, widget: SegmentWidget) -> None:
    viewer.add_image(tifffile.imread(SAMPLE)[:32, :96, :96], scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    widget.threshold.setText("0.9")
    widget.minimum_size.setText("60")
    labels = segment(viewer, widget)
    parameters = labels.metadata["stackseg"]["parameters"]
    assert (parameters["threshold"], parameters["minimum_size"]) == ("0.9", "60")
    assert min(np.unique(labels.data[labels.data > 0], return_counts=True)[1]) >= 60
    widget.minimum_size.setText("100 µm³")
    larger = segment(viewer, widget)
    # A voxel has 0.02 µm³.
    assert min(np.unique(larger.data[larger.data > 0], return_counts=True)[1]) >= 5000
    widget.threshold.setText("2")
    widget.segment()
    wait_until(lambda: "✗" in widget.message.text())
    assert "foreground threshold" in widget.message.text()


@pytest.mark.parametrize(("order", "diameter"), [((0, 1, 2, 3), 3.96), ((0, 3, 1, 2), 3.9)])
def test_circle_is_dragged_over_an_object(
    viewer: Any, widget: SegmentWidget, order: tuple[int, ...], diameter: float
) -> None:
    viewer.add_image(np.zeros((2, 40, 100, 100)), scale=(1, 0.5, 0.2, 0.2), units=["s", *["um"] * 3], rgb=False)
    widget.axes.setCurrentText("TZYX")
    viewer.dims.order = order
    widget.measure()
    # A fifth of the shorter side of the plane, between the centers of voxels.
    assert widget.diameter_value.text() == f"{diameter}um"
    shapes = viewer.layers["object diameter"]
    assert viewer.layers.selection.active is shapes
    assert shapes.selected_data == {0}
    assert set(shapes.data[0][:, 0]) == {viewer.dims.point[0]}
    drag_corner(viewer, shapes, factor=2)
    assert widget.get_parameters()["diameter"] == f"{2 * diameter:g}um"
    widget.measure()
    assert [layer.name for layer in viewer.layers].count("object diameter") == 1


def test_canceling_ends_the_job_on_the_server(viewer: Any, widget: SegmentWidget) -> None:
    viewer.add_image(np.tile(tifffile.imread(SAMPLE), (6, 3, 3)), scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    widget.diameter.setCurrentIndex(widget.diameter.findData("none"))
    widget.segment()
    run = widget.task
    assert run is not None
    wait_until(lambda: run.job is not None and widget.progress.value() > 0)
    widget.cancel()
    wait_until(widget.start_button.isEnabled)
    assert (widget.message.text(), widget.progress.value()) == ("Canceled.", 0)
    assert len(viewer.layers) == 1
    with Client(connection.CONNECTION.url) as client:
        assert run.job is not None
        assert client.job(run.job.id).report.state == "cancelled"


def test_time_series_have_labels_with_times(viewer: Any, widget: SegmentWidget) -> None:
    stack = tifffile.imread(SAMPLE)[:32, :96, :96]
    image = viewer.add_image(
        np.stack([stack, np.roll(stack, 2, 2)]), scale=(30, 0.5, 0.2, 0.2), units=["s", "um", "um", "um"]
    )
    widget.all_times.setChecked(True)
    widget.link.setCurrentIndex(1)
    labels = segment(viewer, widget)
    assert labels.data.shape == image.data.shape
    np.testing.assert_array_equal(labels.scale, image.scale)
    assert len(np.intersect1d(labels.data[0], labels.data[1])) > 10


def test_pixel_sizes_of_planes_are_used(viewer: Any, widget: SegmentWidget) -> None:
    place: dict[str, Any] = {"scale": (200, 200), "translate": (5000, 6000), "units": ["nm"] * 2}
    image = viewer.add_image(tifffile.imread(SAMPLE)[24, :96, :96], **place)
    assert widget.voxel_size.text() == "0.2, 0.2, 0.2"
    widget.diameter.setCurrentIndex(widget.diameter.findData(""))
    widget.diameter_value.setText("4um")
    labels = segment(viewer, widget)
    assert labels.data.shape == image.data.shape
    np.testing.assert_array_equal(labels.extent.world, image.extent.world)
    assert labels.units == image.units
    assert set(labels.features["unit"]) == {"um"}


def test_changes_of_the_layer_are_followed(viewer: Any, widget: SegmentWidget) -> None:
    stack = np.zeros((2, 3, 4, 8, 8), np.uint16)
    viewer.add_image(stack[0, 0], name="other")
    image = viewer.add_image(stack, name="a")
    widget.layer.setCurrentText("a")
    widget.axes.setCurrentText("CTZYX")
    widget.channel.setCurrentIndex(1)
    assert widget.voxel_size.text() == ""
    image.units = ["pixel", "s", "um", "um", "um"]
    image.scale = (1, 30, 0.5, 0.2, 0.2)
    assert widget.voxel_size.text() == "0.5, 0.2, 0.2"
    assert (widget.axes.currentText(), widget.channel.currentText()) == ("CTZYX", "1")
    image.name = "b"
    viewer.layers[0].name = "a"
    assert widget.get_image() is image
    assert widget.layer.currentText() == "b"
    image.axis_labels = ("t", "c", "z", "y", "x")
    parameters = widget.get_parameters()
    assert (parameters["axes"], parameters["channel"]) == ("TCZYX", 1)


class FailingArray:
    """An array that cannot be read completely, such as that of a Dask graph."""

    shape, ndim, dtype = (8, 512, 512), 3, np.dtype(np.uint16)

    def __getitem__(self, index: Any) -> Any:
        if (index[0].start or 0) > 1:
            raise RuntimeError("The disk is missing.")
        return np.zeros(self.shape, self.dtype)[index]


def test_errors_of_lazy_arrays_are_shown(viewer: Any, widget: SegmentWidget) -> None:
    image = viewer.add_image(np.zeros((4, 8, 8), np.uint16))
    run = Segmentation(connection.CONNECTION, FailingArray(), image.name, {"axes": "ZYX"})
    widget.begin(run)
    background.start(run.run, done=print, failed=widget.fail)
    wait_until(widget.start_button.isEnabled, 20)
    assert widget.message.text() == "✗ The disk is missing."


def test_widgets_keep_their_servers(viewer: Any, widget: SegmentWidget, url: str) -> None:
    other = SegmentWidget(viewer)
    other.url.setText("http://127.0.0.1:9")
    other.connect_to_server()
    wait_until(lambda: "✗" in other.message.text())
    assert other.model.count() == 0
    viewer.add_image(tifffile.imread(SAMPLE)[:16, :64, :64], scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    assert segment(viewer, widget).data.shape == (16, 64, 64)


def test_models_of_classes_need_no_table(viewer: Any, widget: SegmentWidget) -> None:
    viewer.add_image(tifffile.imread(SAMPLE)[:16, :64, :64], scale=(0.5, 0.2, 0.2), units=["um"] * 3)
    widget.model.setCurrentText("tissue")
    labels = segment(viewer, widget)
    assert labels.data.shape == (16, 64, 64)
    assert widget.message.text().startswith("Classes: 0 background, 1 cell, 2 membrane.")


def test_errors_say_what_to_do(viewer: Any, widget: SegmentWidget) -> None:
    viewer.add_image(np.zeros((4, 8, 8), np.uint16))
    widget.diameter.setCurrentIndex(widget.diameter.findData(""))
    widget.diameter_value.setText("wide")
    widget.segment()
    wait_until(lambda: "✗" in widget.message.text())
    assert "wide" in widget.message.text()
    assert widget.start_button.isEnabled()
    widget.url.setText("http://127.0.0.1:9")
    widget.connect_to_server()
    wait_until(lambda: "Is the server running?" in widget.message.text())


def test_corrected_labels_train_a_model(viewer: Any, widget: SegmentWidget) -> None:
    widget.open_sample()
    wait_until(lambda: len(viewer.layers))
    labels = segment(viewer, widget)
    viewer.add_image(np.zeros_like(viewer.layers[0].data), name="another")
    labels.data[labels.data == 5] = 0
    training = TrainingWidget(viewer)
    viewer.window.add_dock_widget(training)
    wait_until(training.model.count)
    training.image.setCurrentText("another")
    training.labels.setCurrentIndex(-1)
    training.labels.setCurrentText(labels.name)
    assert (training.image.currentText(), training.model.currentText()) == ("nuclei sample", "nuclei")
    training.save()
    wait_until(lambda: training.annotations.count() or "✗" in training.message.text())
    assert training.annotations.count() == 1, training.message.text()
    with Client(connection.CONNECTION.url) as client:
        (record,) = connection.list_annotations(client)
        assert record["job"] == labels.metadata["stackseg"]["job"]
    training.train()
    wait_until(lambda: training.message.text().startswith("Training") or "✗" in training.message.text())
    training.cancel()
    wait_until(training.start_button.isEnabled)
    assert "cancelled" in training.message.text()


def test_labels_without_a_job_are_saved_with_their_image(viewer: Any, url: str) -> None:
    stack = tifffile.imread(SAMPLE)[:24]
    place: dict[str, Any] = {"scale": (0.5, 0.2, 0.2), "units": ["um"] * 3}
    viewer.add_image(stack, name="own", **place)
    viewer.add_labels((stack > stack.mean()).astype(np.uint8), **place)
    training = TrainingWidget(viewer)
    training.save()
    wait_until(lambda: "Saved" in training.message.text() or "✗" in training.message.text())
    assert training.message.text() == "Saved as own."
    with Client(url) as client:
        assert connection.list_annotations(client)[0]["job"] is None


def test_both_widgets_fit_in_a_small_window(viewer: Any, widget: SegmentWidget) -> None:
    training = TrainingWidget(viewer)
    viewer.window.add_dock_widget(training)
    viewer.window._qt_window.show()
    wait_until(training.model.count)
    for each in (widget, training):
        assert each.minimumSizeHint().height() < 300
        wait_until(lambda each=each: each.content.minimumSizeHint().width() <= each.content.width(), 20)
        # Buttons and messages do not scroll.
        assert not each.content.isAncestorOf(each.start_button)
        assert not each.content.isAncestorOf(each.message)


def test_files_and_addresses_without_a_scheme_are_read(viewer: Any, widget: SegmentWidget) -> None:
    widget.url.setText(widget.url.text().removeprefix("http://"))
    widget.connect_to_server()
    wait_until(lambda: "Connected" in widget.message.text())
    viewer.open(SAMPLE, plugin="napari")
    assert widget.voxel_size.text() == ""
    widget.read_file()
    assert widget.message.text() == "Reading the file."
    wait_until(widget.voxel_size.text)
    assert widget.voxel_size.text() == "0.5, 0.2, 0.2"
    assert "Axes: depth, height, width." in widget.message.text()


def test_saved_results_open_with_their_voxel_size(viewer: Any, url: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.tif"
    with Client(url) as client:
        client.segment(SAMPLE, save_to=path)
    reader = files.get_reader(str(path))
    assert reader is not None
    ((data, arguments, kind),) = reader(str(path))
    assert (data.shape, arguments["scale"], kind) == ((48, 192, 192), [0.5, 0.2, 0.2], "labels")
    layer = viewer.add_labels(data, **arguments)
    assert {str(unit) for unit in layer.units} == {"micrometer"}
    assert files.get_reader(str(SAMPLE)) is None
    (tmp_path / "damaged.tif").write_bytes(path.read_bytes()[:100])
    assert files.get_reader(str(tmp_path / "damaged.tif")) is None


def test_the_sample_opens_from_the_menu(viewer: Any) -> None:
    ((data, arguments, kind),) = files.open_sample()
    assert (data.shape, arguments["scale"], kind) == ((48, 192, 192), [0.5, 0.2, 0.2], "image")
