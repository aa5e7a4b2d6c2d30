"""The record of a training run, in memory and on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from service.core.files.atomic_files import write_atomically
from service.models.spec import TargetName

# A run is "unimproved" if the new model was not better than its base model and was therefore deleted.
TrainingState = Literal["waiting", "running", "done", "unimproved", "failed", "cancelled", "interrupted"]
# Stages of a training run. "learning" covers the optimizer steps. The new model is scored in "evaluating".
TrainingStage = Literal["reading", "scoring", "learning", "finishing", "evaluating", "serving"]
STAGES: tuple[TrainingStage, ...] = get_args(TrainingStage)

# Maximum number of points in a loss curve. When a curve exceeds this number, every second point is dropped.
MAX_CURVE_POINTS = 512
# Message for training runs that were interrupted by a stop or crash of the service.
INTERRUPTED_MESSAGE = (
    "The service was stopped before the training run ended, so the progress is lost. Start the training again."
)


@dataclass
class TrainingRecord:
    """A training run. Times are in seconds since the Unix epoch.

    name            name of the new model
    base_model      name and version of the model from which the training starts
    stage           current stage; the first stage while the training run is waiting
    loss            pairs of step and training loss, thinned out if there are many steps
    validation      pairs of step and validation loss; the first pair is from before the first step
    f1              pairs of step and F1 score of the objects in the validation parts
    partial         whether only some objects of the stacks are annotated
    partial_planes  whether only some planes of the stacks are annotated
    target          what the new model learns; None for the same as the base model
    before          score of the base model on held-out data: F1 at an intersection over union of 0.5
    after           score of the new model on the same data
    better          whether the new model is better than the base model
    stride          number of steps between two pairs in `loss`
    start_clock     `time.monotonic` at the start of the run in this process; not stored
    """

    id: str
    owner: str | None
    name: str
    base_model: str
    annotations: list[str]
    minutes: float
    created: float
    state: TrainingState = "waiting"
    started: float | None = None
    ended: float | None = None
    step: int = 0
    steps: int | None = None
    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    before: float | None = None
    after: float | None = None
    better: bool | None = None
    message: str = ""
    stride: int = 1
    stage: TrainingStage = "reading"
    f1: list[tuple[int, float]] = field(default_factory=list)
    partial: bool = False
    partial_planes: bool = False
    target: TargetName | None = None
    start_clock: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the training run is neither waiting nor running."""
        return self.state not in {"waiting", "running"}

    @property
    def seconds_left(self) -> float | None:
        """Maximum number of seconds until the run ends; None if it is not running or takes longer than requested.

        The run may end sooner.
        """
        if self.state != "running" or self.start_clock is None:
            return None
        remaining_seconds = 60 * self.minutes - (time.monotonic() - self.start_clock)
        return remaining_seconds if remaining_seconds > 0 else None

    def update(self, progress: Mapping[str, Any]) -> None:
        """Apply a progress message. Raises ValueError, TypeError or LookupError if the message is invalid."""
        if "stage" in progress:
            self.stage = STAGES[STAGES.index(progress["stage"])]
        if "steps" in progress:
            self.steps = int(progress["steps"])
        if "before" in progress:
            self.before = float(progress["before"])
        if "validation" in progress:
            step, loss = progress["validation"]
            _append_point(self.validation, int(step), math.nan if loss is None else float(loss))
        if "f1" in progress:
            step, f1 = progress["f1"]
            _append_point(self.f1, int(step), float(f1))
        if "loss" in progress:
            self._add_loss(int(progress["step"]), float(progress["loss"]))
        if "done" in progress:
            result = progress["done"]
            self.after, self.better, self.message = (
                float(result["after"]),
                bool(result["better"]),
                str(result["message"]),
            )

    def _add_loss(self, step: int, loss: float) -> None:
        """Add a point to the loss curve, and thin out the curve if it is too long."""
        self.step = step
        if step % self.stride == 0:
            _append_point(self.loss, step, loss)
        if len(self.loss) > MAX_CURVE_POINTS:
            self.stride *= 2
            self.loss = [point for point in self.loss if point[0] % self.stride == 0]

    def save(self, folder: Path) -> None:
        """Write the record atomically. Raises OSError.

        An unfinished run is written as interrupted, because the file is read only after a restart.
        """
        content = {name: value for name, value in asdict(self).items() if name != "start_clock"}
        if not self.has_ended:
            content |= {"state": "interrupted", "message": INTERRUPTED_MESSAGE}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with write_atomically(folder / f"{self.id}.json") as partial_path:
            partial_path.write_text(json.dumps(content), encoding="utf-8")


def _append_point(curve: list[tuple[int, float]], step: int, loss: float) -> None:
    """Add a point to a curve. Skip NaN and infinity, which JSON does not support."""
    if math.isfinite(loss):
        curve.append((step, loss))


def delete_partial_records(folder: Path) -> None:
    """Delete incomplete records of killed processes. Ignore errors."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            path.unlink()


def read_records(folder: Path) -> list[TrainingRecord]:
    """Read the records in a folder, oldest first. Skip damaged records. The folder need not exist."""
    records = []
    for path in folder.glob("*.json"):
        try:
            records.append(TrainingRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(records, key=lambda record: record.created)
