"""The dock widget that segments a layer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from napari.layers import Image, Shapes
from qtpy.QtCore import QSize, Qt
from qtpy.QtGui import QIcon, QPixmap
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
)
from stackseg_client import Inspection, JobReport, Model, Result

from napari_stackseg import background, layers, messages, object_diameter
from napari_stackseg.connection import CONNECTION, Connection, list_models
from napari_stackseg.files import read_sample
from napari_stackseg.layer_box import LayerBox
from napari_stackseg.segmentation import Segmentation, inspect_file
from napari_stackseg.task_widget import TaskWidget

PICTURE_WIDTH = 140
ICON = QSize(48, 48)
# Object diameters to choose from, by value of the parameter.
DIAMETERS = {None: "as the model suggests", "auto": "estimate", "none": "original resolution", "": "measured:"}
LINKS = {None: "number objects independently", "overlap": "track by overlap", "laptrack": "track by distance"}
STATES = {"loading": "Loading the model", "waiting": "Waiting for other jobs", "running": "Segmenting"}


class SegmentWidget(TaskWidget[Segmentation]):
    """Segments a layer, and adds the labels as a new layer."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__("Segment", "Cancel")
        self._viewer = napari_viewer
        self._models: list[tuple[Model, bytes]] = []
        self.url, self.key = QLineEdit(CONNECTION.url), QLineEdit(CONNECTION.key or "")
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.connect_button = QPushButton("Connect")
        self.model, self.picture, self.sample_button = QComboBox(), QLabel(), QPushButton("Open its sample")
        self.model.setIconSize(ICON)
        self.layer, self.axes, self.channel = LayerBox(napari_viewer, Image), QComboBox(), QComboBox()
        self.voxel_size, self.voxel_note = QLineEdit(), QLabel()
        self.voxel_size.setPlaceholderText("z, y, x in µm; empty: unknown")
        self.file_button = QPushButton("Read from the file")
        self.diameter, self.diameter_value = QComboBox(), QLineEdit()
        self.diameter_value.setPlaceholderText("6.5um or 15px")
        self.measure_button = QPushButton("Measure with a circle or line")
        self.threshold, self.minimum_size = QLineEdit(), QLineEdit()
        self.threshold.setPlaceholderText("model default, or 0 to 1")
        self.minimum_size.setPlaceholderText("500 voxels, or 12.5um3")
        self.all_times, self.link = QCheckBox("All time points"), QComboBox()
        self.progress = QProgressBar()
        self.progress.setRange(0, 100)
        for label in (self.picture, self.voxel_note):
            label.setWordWrap(True)
        for value, text in DIAMETERS.items():
            self.diameter.addItem(text, value)
        for value, text in LINKS.items():
            self.link.addItem(text, value)
        self._arrange()
        self._connect()
        self._show_layer()
        self.connect_to_server()

    def _arrange(self) -> None:
        form = QFormLayout()
        for text, *widgets in (
            ("Server", self.url),
            ("API key", self.key, self.connect_button),
            ("Model", self.model),
            ("", self.picture),
            ("", self.sample_button),
            ("Image", self.layer),
            ("Axes", self.axes),
            ("Channel", self.channel),
            ("Voxel size", self.voxel_size, self.file_button),
            ("", self.voxel_note),
            ("Object diameter", self.diameter, self.diameter_value),
            ("", self.measure_button),
            ("Foreground threshold", self.threshold),
            ("Minimum object size", self.minimum_size),
            ("Time series", self.all_times, self.link),
        ):
            row = QHBoxLayout()
            for widget in widgets:
                row.addWidget(widget)
            form.addRow(text, row)
        layout, buttons = QVBoxLayout(self.content), QHBoxLayout()
        buttons.addWidget(self.start_button)
        buttons.addWidget(self.cancel_button)
        layout.addLayout(form)
        layout.addStretch()
        self.footer.addLayout(buttons)
        self.footer.addWidget(self.progress)
        self.footer.addWidget(self.message)

    def _connect(self) -> None:
        self.connect_button.clicked.connect(self.connect_to_server)
        self.model.currentIndexChanged.connect(self._show_model)
        self.sample_button.clicked.connect(self.open_sample)
        self.layer.currentIndexChanged.connect(self._show_layer)
        self.axes.currentIndexChanged.connect(self._show_axes)
        self.file_button.clicked.connect(self.read_file)
        self.measure_button.clicked.connect(self.measure)
        self.start_button.clicked.connect(self.segment)
        self.cancel_button.clicked.connect(self.cancel)

    def connect_to_server(self) -> None:
        """List the models of the server."""
        url = self.url.text().strip()
        CONNECTION.url, CONNECTION.key = url if "://" in url else f"http://{url}", self.key.text().strip() or None
        # The other widgets of this kind stay connected to the server whose models they show.
        self._connection = replace(CONNECTION)
        self._models = []
        self.model.clear()
        self.message.setText("Connecting.")
        done = partial(self._show_models, self._connection)
        background.start(list_models, self._connection, done=done, failed=self.show_error)

    def _show_models(self, connection: Connection, models: list[tuple[Model, bytes]]) -> None:
        if connection is not self._connection:
            return
        self._models = models
        self.model.clear()
        for model, picture in models:
            pixmap = QPixmap()
            pixmap.loadFromData(picture)
            self.model.addItem(QIcon(pixmap), model.name, model.name)
            self.model.setItemData(self.model.count() - 1, model.problem or model.summary, Qt.ItemDataRole.ToolTipRole)
        default = next((index for index, (model, _) in enumerate(models) if model.is_default), 0)
        self.model.setCurrentIndex(default)
        count = "1 model" if len(models) == 1 else f"{len(models)} models"
        self.message.setText(f"Connected. {count}." if models else "The server has no models.")
        self.fit_width()

    def _show_model(self, index: int) -> None:
        if not 0 <= index < len(self._models):
            return
        model, picture = self._models[index]
        pixmap = QPixmap()
        if picture and pixmap.loadFromData(picture):
            self.picture.setPixmap(pixmap.scaledToWidth(PICTURE_WIDTH))
        else:
            self.picture.setText(model.problem or model.summary or "")
        self.picture.setToolTip(model.problem or model.summary or "")

    def open_sample(self) -> None:
        """Add the sample stack of the model as a layer."""

        def add(layer_data: tuple[Any, dict[str, Any]]) -> None:
            self._viewer.add_image(layer_data[0], **layer_data[1])

        background.start(read_sample, self._connection, self.model.currentData(), done=add, failed=self.show_error)

    def get_image(self) -> Any:
        """Return the chosen layer. Raises ValueError if there is none."""
        if self.layer.layer is None:
            raise ValueError("Open a stack, or press “Open its sample”.")
        return self.layer.layer

    def _show_layer(self, _index: int = 0) -> None:
        self.axes.clear()
        image = self.layer.layer
        if image is not None:
            self.axes.addItems(layers.list_axes(image))
            self.file_button.setEnabled(Path(image.source.path or "").is_file())
            # Users may set the scale and the axes after they have added a layer.
            for name in layers.CALIBRATION_EVENTS:
                image.events[name].connect(self._update_layer)

    def _update_layer(self, event: Any) -> None:
        if event.source is self.layer.layer:
            axes, channel = self.axes.currentText(), self.channel.currentIndex()
            self._show_layer()
            # Axes that are not in the list change nothing.
            self.axes.setCurrentText(axes)
            self.channel.setCurrentIndex(min(channel, self.channel.count() - 1))

    def _show_axes(self, _index: int = 0) -> None:
        axes = self.axes.currentText()
        self.channel.clear()
        if not axes:
            return
        image = self.get_image()
        position = axes.find("C") if "C" in axes else axes.find("S")
        count = 1 if position < 0 else layers.get_pixels(image).shape[position]
        self.channel.addItems(map(str, range(count)))
        size, note = layers.get_voxel_size(image, axes)
        self.voxel_size.setText("" if size is None else ", ".join(f"{length:g}" for length in size))
        self.voxel_note.setText(note)
        for widget in (self.all_times, self.link):
            widget.setEnabled("T" in axes)

    def read_file(self) -> None:
        """Let the server read axes and voxel size from the file of the layer."""
        path = str(self.get_image().source.path)
        self.message.setText("Reading the file.")
        background.start(inspect_file, self._connection, path, done=self._use_inspection, failed=self.show_error)

    def _use_inspection(self, inspection: Inspection) -> None:
        if inspection.voxel_size is not None:
            self.voxel_size.setText(", ".join(f"{length:g}" for length in inspection.voxel_size))
            self.voxel_note.setText(f"from the file: {inspection.raw['file']['voxel_size_from']}")
        if self.axes.findText(inspection.axes) >= 0:
            self.axes.setCurrentText(inspection.axes)
        self._show_inspection(inspection)

    def _show_inspection(self, inspection: Inspection) -> None:
        text = layers.describe_stack(inspection.axes, inspection.stored_shape, inspection.voxel_size)
        seconds = messages.describe_seconds(inspection.seconds)
        outlook = inspection.problem or (f"The segmentation takes {seconds}." if seconds else "")
        self.message.setText(messages.rephrase(" ".join(filter(None, [text, *inspection.notes, outlook]))))

    def measure(self) -> None:
        """Use the drawn line or circle as object diameter, and follow its changes. Add a circle if there is none."""
        try:
            image, shapes = self.get_image(), self._viewer.layers.selection.active
            if not isinstance(shapes, Shapes):
                shapes = next((layer for layer in reversed(self._viewer.layers) if isinstance(layer, Shapes)), None)
            if shapes is None:
                shapes = object_diameter.add_circle(self._viewer, image)
            self._measure(image, shapes)
        except ValueError as error:
            self.show_error(error)
            return
        # Connected once, also if the button is pressed again.
        shapes.events.data.connect(self._update_measurement)

    def _measure(self, image: Any, shapes: Any) -> None:
        measured = object_diameter.measure_shape(shapes, image, self.axes.currentText(), self.get_voxel_size())
        hint = " Drag the circle, or its corners, over an object." if shapes.name == object_diameter.CIRCLE_NAME else ""
        self.message.setText(messages.rephrase(f"Measured object diameter: {measured}.") + hint)
        self.diameter_value.setText(measured)
        self.diameter.setCurrentIndex(self.diameter.findData(""))

    def _update_measurement(self, event: Any) -> None:
        # While a shape is being drawn or removed, there may be nothing to measure.
        with suppress(ValueError):
            self._measure(self.get_image(), event.source)

    def get_voxel_size(self) -> layers.VoxelSize | None:
        """Return the voxel size Z, Y, X in micrometers. Raises ValueError if the text is none."""
        text = self.voxel_size.text().strip()
        if not text:
            return None
        try:
            z, y, x = (float(part) for part in text.replace(",", " ").split())
        except ValueError as error:
            raise ValueError(f"The voxel size {text!r} does not consist of three numbers: 0.5, 0.2, 0.2.") from error
        return z, y, x

    def get_parameters(self) -> dict[str, Any]:
        """Return the parameters of the API. Raises ValueError for an invalid voxel size or diameter."""
        axes, image = self.axes.currentText(), self.get_image()
        if not axes:
            raise ValueError(f"{image.name} has {image.ndim} dimensions. Stacks have up to five: TCZYX.")
        time: str | int | None = None
        if "T" in axes:
            shown = layers.get_position(image, self._viewer.dims.point, axes, "T")
            time = "all" if self.all_times.isChecked() else shown
        diameter = self.diameter.currentData()
        if diameter == "":
            diameter = self.diameter_value.text().replace(" ", "").replace("µ", "u")
            if not diameter:
                raise ValueError("Enter the object diameter, such as 6.5um or 15px, or measure it.")
        return {
            "model": self.model.currentData(),
            "axes": axes,
            "voxel_size": self.get_voxel_size(),
            "channel": self.channel.currentIndex() if self.channel.count() > 1 else None,
            "time": time,
            "link": self.link.currentData() if time == "all" else None,
            "diameter": diameter,
            "threshold": self.threshold.text().strip() or None,
            "minimum_size": self.minimum_size.text().strip() or None,
        }

    def segment(self) -> None:
        """Segment the layer in the background."""
        try:
            parameters, image = self.get_parameters(), self.get_image()
        except ValueError as error:
            self.show_error(error)
            return
        run = Segmentation(self._connection, layers.get_pixels(image), image.name, parameters)
        self.begin(run)
        self.progress.setValue(0)
        self.message.setText("Starting.")
        done = partial(self._add_labels, image, run)
        background.start(run.run, done=done, failed=self.fail, reported=self._show_report)

    def cancel(self) -> None:
        """Cancel the job on the server."""
        if self.task is not None:
            self.message.setText("Canceling.")
            self.cancel_button.setEnabled(False)
            background.start(self.task.cancel, done=lambda _result: None, failed=self.show_error)

    def _show_report(self, report: str | Inspection | JobReport) -> None:
        if isinstance(report, Inspection):
            self._show_inspection(report)
        elif isinstance(report, JobReport):
            self.progress.setValue(round(100 * report.fraction))
            left = messages.describe_seconds(report.seconds_left)
            if report.state in STATES:
                self.message.setText(STATES[report.state] + (f", {left} left." if left else "."))
        else:
            self.message.setText(report)

    def _add_labels(self, image: Any, run: Segmentation, result: Result | None) -> None:
        self.finish()
        if result is None:
            self.progress.setValue(0)
            self.message.setText("Canceled.")
            return
        self.progress.setValue(100)
        parameters = run.parameters
        chosen = {"C": parameters["channel"] or 0}
        if isinstance(parameters["time"], int):
            chosen["T"] = parameters["time"]
        try:
            labels, arguments = layers.make_labels_layer(result.labels, image, parameters["axes"], chosen)
        except ValueError as error:
            self.show_error(error)
            return
        metadata = {"job": run.job and run.job.id, "image": image.name, "parameters": parameters}
        self._viewer.add_labels(
            labels,
            name=f"{image.name} labels",
            features=layers.make_features(result.table),
            metadata={"stackseg": metadata},
            **arguments,
        )
        outputs = next((model.outputs for model, _ in self._models if model.name == parameters["model"]), [])
        self.message.setText(messages.describe_result(result, outputs))
