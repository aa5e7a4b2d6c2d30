"""A list of the layers of a viewer to choose from."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import QSignalBlocker
from qtpy.QtWidgets import QComboBox


class LayerBox(QComboBox):
    """The names of the layers of one class. The chosen layer stays the same if layers are renamed, added or removed."""

    def __init__(self, viewer: Any, kind: type) -> None:
        super().__init__()
        self._viewer, self._kind = viewer, kind
        self._layers: list[Any] = []
        for event in (viewer.layers.events.inserted, viewer.layers.events.removed):
            event.connect(self._update)
        self._update()

    @property
    def layer(self) -> Any:
        """The chosen layer; None if there is none."""
        index = self.currentIndex()
        return self._layers[index] if index >= 0 else None

    def _update(self, _event: object = None) -> None:
        """List the layers, and report the choice if it has changed."""
        chosen = self.layer
        with QSignalBlocker(self):
            self.clear()
            self._layers = [layer for layer in self._viewer.layers if isinstance(layer, self._kind)]
            self.addItems([layer.name for layer in self._layers])
            self.setCurrentIndex(next((index for index, layer in enumerate(self._layers) if layer is chosen), 0))
        for layer in self._layers:
            # Connected once, also if the list is updated again.
            layer.events.name.connect(self._update)
        if self.layer is not chosen:
            self.currentIndexChanged.emit(self.currentIndex())
