"""A widget that starts one task at a time on the server, and shows its state and its errors."""

from __future__ import annotations

from typing import Generic, TypeVar

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QLabel, QPushButton, QScrollArea, QWidget

from napari_stackseg import messages

Task = TypeVar("Task")

# Height in pixels at which a widget is still usable if two of them share the height of a small window.
MIN_HEIGHT = 240


class TaskWidget(QScrollArea, Generic[Task]):
    """The buttons that start and cancel a task, a message, and the running task.

    content  the widget that contains all others; it scrolls if the window is too low for two widgets of the plugin
    task     the running task; None if there is none
    """

    def __init__(self, start_text: str, cancel_text: str) -> None:
        super().__init__()
        self.content = QWidget()
        self.setWidgetResizable(True)
        self.setWidget(self.content)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setMinimumHeight(MIN_HEIGHT)
        self.task: Task | None = None
        self.start_button, self.cancel_button = QPushButton(start_text), QPushButton(cancel_text)
        self.cancel_button.setEnabled(False)
        self.message = QLabel()
        self.message.setWordWrap(True)

    def fit_width(self) -> None:
        """Make the widget as wide as its content, which depends on the style and on the models, and a scroll bar."""
        border = 2 * self.frameWidth() + self.verticalScrollBar().sizeHint().width()
        self.setMinimumWidth(self.content.minimumSizeHint().width() + border)

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
