"""A training as its owner sees it, and on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from service.core.files.whole_file import write_whole

TrainingState = Literal["waiting", "running", "done", "failed", "cancelled", "interrupted"]
# What a training that runs does: steps are taken in "learning", and the new model is scored in "evaluating".
TrainingStage = Literal["reading", "scoring", "learning", "finishing", "evaluating", "serving"]
STAGES: tuple[TrainingStage, ...] = get_args(TrainingStage)

# Points of a curve: beyond, every second one is dropped.
MOST_POINTS = 512
# Ending of a record that is being written.
INTERRUPTED = "The service was stopped before the training ended, and nothing is left of it; start it again."


@dataclass
class TrainingRecord:
    """A training; times are seconds since 1970.

    name        of the new model
    base_model  that it goes on from, with its version
    stage       that it has come to; the first until it runs
    loss        [step, training loss], thinned out where there are many
    validation  [step, loss on what is not trained on], the first before any step
    before      score of the base model on what is held out, F1 at an intersection over union of 0.5; `after` of the new
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
    # Every so many steps have a point in `loss`.
    stride: int = 1
    stage: TrainingStage = "reading"

    @property
    def over(self) -> bool:
        """Whether the training neither waits nor runs."""
        return self.state not in {"waiting", "running"}

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the training may still run; None if it does not run, or takes longer than was asked for.

        It may end sooner.
        """
        if self.state != "running" or self.started is None:
            return None
        left = 60 * self.minutes - (time.time() - self.started)
        return left if left > 0 else None

    def update(self, news: Mapping[str, Any]) -> None:
        """Take over a line of progress. Raises ValueError, TypeError or LookupError where it makes no sense."""
        if "stage" in news:
            self.stage = STAGES[STAGES.index(news["stage"])]
        if "steps" in news:
            self.steps = int(news["steps"])
        if "before" in news:
            self.before = float(news["before"])
        if "validation" in news:
            step, value = news["validation"]
            _append(self.validation, int(step), float(value))
        if "loss" in news:
            self._add_loss(int(news["step"]), float(news["loss"]))
        if "done" in news:
            done = news["done"]
            self.after, self.better, self.message = float(done["after"]), bool(done["better"]), str(done["message"])

    def _add_loss(self, step: int, loss: float) -> None:
        """Add a point to the curve of the loss, which becomes coarser as it grows."""
        self.step = step
        if step % self.stride == 0:
            _append(self.loss, step, loss)
        if len(self.loss) > MOST_POINTS:
            self.stride *= 2
            self.loss = [point for point in self.loss if point[0] % self.stride == 0]

    def save(self, folder: Path) -> None:
        """Write the record, whole or not at all. Raises OSError.

        One that is not over is written as interrupted: that is what it is for whoever reads it after a crash.
        """
        content = asdict(self)
        if not self.over:
            content |= {"state": "interrupted", "message": INTERRUPTED}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with write_whole(folder / f"{self.id}.json") as partial:
            partial.write_text(json.dumps(content), encoding="utf-8")


def _append(curve: list[tuple[int, float]], step: int, value: float) -> None:
    """Add a point to a curve; JSON has no other numbers than finite ones."""
    if math.isfinite(value):
        curve.append((step, value))


def delete_partial(folder: Path) -> None:
    """Delete the records that processes which were killed have written by half. Raises nothing."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            path.unlink()


def read_records(folder: Path) -> list[TrainingRecord]:
    """Read the records in a folder, which may not be there, oldest first; damaged ones are left out."""
    records = []
    for path in folder.glob("*.json"):
        try:
            records.append(TrainingRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(records, key=lambda record: record.created)
