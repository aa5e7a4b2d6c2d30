"""Corrected labels as annotated stacks on the server, and training runs, which can be canceled from another thread."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray
from stackseg_client.errors import RequestError

from napari_stackseg.connection import Connection, annotate, cancel_training, get_training, list_annotations, train

POLL_SECONDS = 1.0
FINAL_STATES = frozenset({"done", "unimproved", "failed", "cancelled", "interrupted"})
# Problems that uploading the stack again solves: the job was deleted, or its stack.
_GONE = frozenset({"unknown-job", "unknown-stack", "result-gone"})


@dataclass(frozen=True)
class Correction:
    """Corrected labels of a stack.

    labels      corrected labels [Z, Y, X] of one channel and time point
    pixels      array of the stack
    parameters  `axes`, `voxel_size`, `channel` and `time` of the labels
    job         id of the job that created the labels; None if unknown
    """

    labels: NDArray[Any]
    pixels: Any
    name: str
    parameters: dict[str, Any]
    job: str | None

    def save(self, connection: Connection) -> dict[str, Any]:
        """Store the annotated stack, and return its record. Raises StackSegError."""
        with connection.open() as client:
            if self.job is not None:
                try:
                    time = self.parameters.get("time")
                    return annotate(client, self.labels, job=self.job, name=self.name, time=time)
                except RequestError as error:
                    if error.type.rpartition(":")[2] not in _GONE:
                        raise
            stack = client.upload(self.pixels, name=self.name).id
            return annotate(client, self.labels, stack=stack, name=self.name, **self.parameters)


def list_state(connection: Connection) -> tuple[list[dict[str, Any]], list[str]]:
    """Return your annotated stacks, and the names of the models, the default model first."""
    with connection.open() as client:
        models = sorted(client.models(), key=lambda model: not model.is_default)
        return list_annotations(client), [model.name for model in models]


@dataclass
class Training:
    """A training run on annotated stacks."""

    connection: Connection
    model: str
    annotations: list[str]
    name: str
    minutes: float
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.connection = replace(self.connection)

    def run(self) -> Generator[dict[str, Any], None, dict[str, Any]]:
        """Train the model, yield reports, and return the last one. Raises StackSegError."""
        with self.connection.open() as client:
            report = train(client, self.model, self.annotations, self.name, self.minutes)
            while report["state"] not in FINAL_STATES:
                yield report
                # `wait` returns immediately once the event is set.
                if self._is_cancelled.wait(POLL_SECONDS):
                    cancel_training(client, report["id"])
                    return {**report, "state": "cancelled"}
                report = get_training(client, report["id"])
            return report

    def cancel(self) -> None:
        """Ask the thread of `run` to cancel the training run on the server."""
        self._is_cancelled.set()


def describe_training(report: dict[str, Any]) -> str:
    """Return the state of a training run for people."""
    if report["state"] in {"failed", "cancelled", "interrupted"}:
        return f"The training was {report['state']}. {report.get('message') or ''}".replace("was failed", "failed")
    if report["state"] == "unimproved":
        return f"The training did not improve the model. {report.get('message') or ''}"
    if report["state"] == "waiting":
        return f"Waiting for other training runs, position {report['position']}."
    if report["state"] == "done":
        return f"The model {report['model']} is ready. {report.get('message') or ''}"
    steps = f", step {report['step']} of {report['steps']}" if report.get("steps") else ""
    return f"Training: {report.get('stage') or 'starting'}{steps}."
