"""The dock widget that stores corrected labels on the server, and trains models on them."""

from __future__ import annotations

from typing import Any

import numpy as np
from napari.layers import Image, Labels
from qtpy.QtCore import Qt
from qtpy.QtWidgets import (
    QComboBox,
    QDoubleSpinBox,
    QFormLayout,
    QLabel,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QVBoxLayout,
)

from napari_stackseg import background, layers
from napari_stackseg.connection import CONNECTION
from napari_stackseg.layer_box import LayerBox
from napari_stackseg.task_widget import TaskWidget
from napari_stackseg.training import Correction, Training, describe_training, list_state


class TrainingWidget(TaskWidget[Training]):
    """Stores corrected labels, and trains models on them. The server is that of the widget `Segment`."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__("Train", "Cancel the training")
        self._viewer = napari_viewer
        self.image, self.labels = LayerBox(napari_viewer, Image), LayerBox(napari_viewer, Labels)
        self.name = QLineEdit()
        self.save_button = QPushButton("Save as annotated stack")
        self.annotations, self.update_button = QListWidget(), QPushButton("Update the list")
        self.model, self.new_name, self.minutes = QComboBox(), QLineEdit("my-model"), QDoubleSpinBox()
        self.minutes.setRange(0.1, 600)
        self.minutes.setValue(5)
        layout, save_form, train_form = QVBoxLayout(self.content), QFormLayout(), QFormLayout()
        for form, text, widget in (
            (save_form, "Corrected labels", self.labels),
            (save_form, "Image", self.image),
            (save_form, "Name", self.name),
            (train_form, "Train from", self.model),
            (train_form, "New name", self.new_name),
            (train_form, "Minutes", self.minutes),
        ):
            form.addRow(text, widget)
        for item in (
            save_form,
            self.save_button,
            QLabel("Annotated stacks to train on:"),
            self.annotations,
            self.update_button,
            train_form,
        ):
            layout.addLayout(item) if isinstance(item, QFormLayout) else layout.addWidget(item)
        for widget in (self.start_button, self.cancel_button, self.message):
            self.footer.addWidget(widget)
        self.labels.currentIndexChanged.connect(self._show_image)
        self.save_button.clicked.connect(self.save)
        self.update_button.clicked.connect(self.update_list)
        self.start_button.clicked.connect(self.train)
        self.cancel_button.clicked.connect(self.cancel)
        self._show_image()
        self.update_list()

    def _show_image(self, _index: int = 0) -> None:
        """Choose the image and the model from which the labels were created."""
        if self.labels.layer is not None:
            record = self.labels.layer.metadata.get("stackseg", {})
            # Names that are not in the list change nothing.
            self.image.setCurrentText(record.get("image", ""))
            self.model.setCurrentText(record.get("parameters", {}).get("model") or "")

    def get_correction(self) -> Correction:
        """Return the chosen labels with their stack. Raises ValueError if layers are missing or do not fit."""
        labels, image = self.labels.layer, self.image.layer
        if labels is None or image is None:
            raise ValueError("Segment a stack first, or add a Labels layer for an image, and correct the labels.")
        record = labels.metadata.get("stackseg", {})
        # The job is that of another stack if the user has chosen another image.
        record = record if record.get("image") == image.name else {}
        parameters = self._get_parameters(image, record.get("parameters", {}))
        volume = layers.take_volume(np.asarray(layers.get_pixels(labels)), parameters["axes"], parameters["time"])
        name = self.name.text().strip() or image.name
        return Correction(volume, layers.get_pixels(image), name, parameters, record.get("job"))

    def _get_parameters(self, image: Any, known: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the labels: those of their segmentation, or else those of the image."""
        axes = known.get("axes") or next(iter(layers.list_axes(image)), "")
        if "Z" not in axes:
            raise ValueError(f"{image.name} is not a stack with the axes ZYX, so no model can be trained on it.")
        time = known.get("time")
        if "T" in axes and not isinstance(time, int):
            time = layers.get_position(image, self._viewer.dims.point, axes, "T")
        voxel_size = known["voxel_size"] if known else layers.get_voxel_size(image, axes)[0]
        return {"axes": axes, "voxel_size": voxel_size, "channel": known.get("channel"), "time": time}

    def save(self) -> None:
        """Store the corrected labels with their stack on the server."""
        try:
            correction = self.get_correction()
        except ValueError as error:
            self.show_error(error)
            return
        self.message.setText("Saving the annotated stack.")
        background.start(correction.save, CONNECTION, done=self._show_saved, failed=self.show_error)

    def _show_saved(self, record: dict[str, Any]) -> None:
        self.message.setText(f"Saved as {record['name']}.")
        self.update_list()

    def update_list(self) -> None:
        """List the annotated stacks and the models of the server."""
        background.start(list_state, CONNECTION, done=self._show_list, failed=self.show_error)

    def _show_list(self, state: tuple[list[dict[str, Any]], list[str]]) -> None:
        annotations, models = state
        self.annotations.clear()
        for annotation in annotations:
            item = QListWidgetItem(annotation["name"])
            item.setData(Qt.ItemDataRole.UserRole, annotation["id"])
            item.setCheckState(Qt.CheckState.Checked)
            self.annotations.addItem(item)
        selected = self.model.currentText()
        self.model.clear()
        self.model.addItems(models)
        self.fit_width()
        if selected in models:
            self.model.setCurrentText(selected)
        else:
            self._show_image()

    def train(self) -> None:
        """Train a model on the checked annotated stacks."""
        items = [self.annotations.item(row) for row in range(self.annotations.count())]
        checked = [item.data(Qt.ItemDataRole.UserRole) for item in items if item.checkState() == Qt.CheckState.Checked]
        if not checked:
            self.show_error(ValueError("Check at least one annotated stack."))
            return
        training = Training(
            CONNECTION, self.model.currentText(), checked, self.new_name.text().strip(), self.minutes.value()
        )
        self.begin(training)
        background.start(training.run, done=self._show_trained, failed=self.fail, reported=self._show_report)

    def cancel(self) -> None:
        """Cancel the training run on the server."""
        if self.task is not None:
            self.task.cancel()

    def _show_report(self, report: dict[str, Any]) -> None:
        self.message.setText(describe_training(report))

    def _show_trained(self, report: dict[str, Any]) -> None:
        self.finish()
        self._show_report(report)
        self.update_list()
