"""A widget that starts one task at a time on the server, and shows its state and its errors."""

from __future__ import annotations

from typing import Generic, TypeVar

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QLabel, QPushButton, QScrollArea, QVBoxLayout, QWidget

from napari_stackseg import messages

Task = TypeVar("Task")

# Minimum height in pixels of the part that scrolls.
MIN_SCROLLED_HEIGHT = 100
# Distance in pixels between the widgets below it and the edge, as for those that scroll.
MARGIN = 10


class TaskWidget(QWidget, Generic[Task]):
    """The buttons that start and cancel a task, a message, and the running task.

    content  the widget for the settings, which scrolls if the window is too low for them
    footer   the layout below it, which is always visible
    task     the running task; None if there is none
    """

    def __init__(self, start_text: str, cancel_text: str) -> None:
        super().__init__()
        self.content, self._scroll_area, self.footer = QWidget(), QScrollArea(), QVBoxLayout()
        self._scroll_area.setWidgetResizable(True)
        self._scroll_area.setWidget(self.content)
        self._scroll_area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll_area.setMinimumHeight(MIN_SCROLLED_HEIGHT)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self._scroll_area, 1)
        layout.addLayout(self.footer)
        self.footer.setContentsMargins(MARGIN, 0, MARGIN, MARGIN)
        self.task: Task | None = None
        self.start_button, self.cancel_button = QPushButton(start_text), QPushButton(cancel_text)
        self.cancel_button.setEnabled(False)
        self.message = QLabel()
        self.message.setWordWrap(True)
        self.message.setAlignment(Qt.AlignmentFlag.AlignTop)

    def fit_width(self) -> None:
        """Make the widget as wide as its content, which depends on the style and on the models, and a scroll bar."""
        area = self._scroll_area
        border = 2 * area.frameWidth() + area.verticalScrollBar().sizeHint().width()
        area.setMinimumWidth(self.content.minimumSizeHint().width() + border)

    def begin(self, task: Task) -> None:
        """Allow the user to cancel the task, and not to start another one."""
        self.task = task
        self.start_button.setEnabled(False)
        self.cancel_button.setEnabled(True)

    def finish(self) -> None:
        """Allow the user to start another task."""
        self.task = None
        self.start_button.setEnabled(True)
        self.cancel_button.setEnabled(False)

    def show_error(self, error: BaseException) -> None:
        """Show the reason and the remedy of an error."""
        self.message.setText(f"✗ {messages.describe_error(error)}")
        self.fit_width()

    def fail(self, error: BaseException) -> None:
        """Finish the task and show its error."""
        self.finish()
        self.show_error(error)
