"""A segmentation on the server, which can be canceled at any time from another thread."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from stackseg_client import Inspection, Job, JobReport, Result

from napari_stackseg.connection import Connection


@dataclass
class Segmentation:
    """A stack, and how to segment it.

    pixels      array of the stack
    name        name of the stack
    parameters  parameters of the API, with `axes`
    stack_id    id of the uploaded stack; None before the upload
    job         the job on the server; None before it is submitted
    """

    connection: Connection
    pixels: Any
    name: str
    parameters: dict[str, Any]
    stack_id: str | None = None
    job: Job | None = None
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # The user may edit the connection while the job is running.
        self.connection = replace(self.connection)

    def run(self) -> Generator[str | Inspection | JobReport, None, Result | None]:
        """Upload and segment the stack, and yield reports. Returns None if it was canceled. Raises StackSegError."""
        with self.connection.open() as client:
            yield "Uploading the stack."
            self.stack_id = client.upload(self.pixels, name=self.name).id
            inspection = client.inspect(stack=self.stack_id, **self.parameters)
            yield inspection
            if not self._is_cancelled.is_set():
                # Only objects can be measured, not classes.
                table = inspection.raw.get("output", "labels") == "labels"
                self.job = client.submit(stack=self.stack_id, table=table, **self.parameters)
                # The job may have been canceled while it was being submitted.
                if self._is_cancelled.is_set():
                    self.job.cancel()
                yield from self.job.progress()
            if self.job is None or self.job.report.state == "cancelled":
                client.delete_stack(self.stack_id)
                return None
            yield "Downloading the labels."
            result = self.job.result()
            # Decoded on the first access, which must not be in the thread of the user interface.
            _ = result.labels
            return result

    def cancel(self) -> None:
        """Cancel the job on the server. Blocks for one request. Raises StackSegError."""
        self._is_cancelled.set()
        if self.job is not None:
            with self.connection.open() as client:
                client.job(self.job.id).cancel()


def inspect_file(connection: Connection, path: str) -> Inspection:
    """Return what the server reads from the file of a layer: axes, voxel size and channels."""
    with connection.open() as client:
        return client.inspect(path)
