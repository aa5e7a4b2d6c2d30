"""The plan and the progress of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from service.core.sections.computing import Training
from service.training.loop.object_scores import rate_partition

CURVE_COLUMNS = (
    "step",
    "learning_rate",
    "loss",
    "validation",
    "skipped",
    "dice",
    "f1_iou50",
    "f1_iou70",
    "precision",
    "recall",
    "voi",
)
# Default learning rates with a base model, and from random weights.
FINE_TUNING_RATE, RANDOM_WEIGHTS_RATE = 1e-3, 3e-3
# Fractions of the change of the weights of a base model; see `TrainingPlan`. Wortsman et al. (2022) recommend one half
# if nothing is known about the images on which the model will be used.
FINE_TUNING_FRACTIONS = (0.5, 0.75)
# Fraction of the training during which the learning rate increases.
WARM_UP_FRACTION = 0.05


class TrainingPlan(Training):
    """Training options: the settings and additional options.

    If there is no time limit, durations are in steps, so that the same seed gives the same result on machines of
    different speed. With a time limit, the learning rate also depends on the elapsed time, so that it has decayed when
    the time is over. Checkpoints contain the options by name, so renaming a field would prevent resuming from older
    checkpoints.

    learning_rate  maximum learning rate
    averaging   decay per step of the moving average of the weights, which is used for the new model
    fractions   ascending fractions of the change of the weights. The first one is validated during training, and
                compared with the others and the complete change at the end. Empty: use the complete change.
    statistics  number of batches from which the batch normalization statistics of the averaged network are computed
    """

    learning_rate: PositiveFloat = 1e-3
    averaging: Annotated[float, Field(ge=0, lt=1)] = 0.99
    fractions: tuple[float, ...] = ()
    statistics: PositiveInt = 40

    def get_learning_rate(self, progress: float) -> float:
        """Return the learning rate after a fraction of the training: a linear warm-up, and then a cosine decay."""
        maximum = self.learning_rate
        if progress < WARM_UP_FRACTION:
            return maximum * (0.1 + 0.9 * progress / WARM_UP_FRACTION)
        decay = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP_FRACTION) / (1 - WARM_UP_FRACTION)))
        return maximum * max(decay, 1e-3)

    def select_options_affecting_result(self) -> dict[str, Any]:
        """Return the options that must not change, so that resumed training gives the same result."""
        return {
            name: value for name, value in self.model_dump().items() if name not in {"minutes", "patience", "workers"}
        }


class ValidationScores(NamedTuple):
    """Scores of a network on the validation parts.

    loss       mean loss
    dice       mean Dice score of the foreground; None if it is undefined
    f1         F1 score of the objects at an IoU above 0.5
    f1_strict  F1 score of the objects at an IoU above 0.7
    precision  fraction of the segmented objects that match an annotated object
    recall     fraction of the annotated objects that match a segmented object
    voi        variation of information, for networks that predict boundaries; lower is better
    """

    loss: float
    dice: float | None
    f1: float
    f1_strict: float
    precision: float
    recall: float
    voi: float | None = None

    def is_better_than(self, other: ValidationScores | None) -> bool:
        """Return whether more objects are correct, or the loss is lower for equally many.

        Networks that predict boundaries are compared by `rate_partition`.
        """
        if other is None:
            return math.isfinite(self.loss)
        rating, other_rating = rate_partition(self.f1, self.voi), rate_partition(other.f1, other.voi)
        if rating is not None and other_rating is not None:
            return math.isfinite(self.loss) and rating > other_rating
        return (round(self.f1, 6), -self.loss) > (round(other.f1, 6), -other.loss)


@dataclass
class TrainerState:
    """The progress of training: the content of a checkpoint except for tensors. Checkpoints contain the field names.

    step     number of completed steps
    best     index of the row of `curve` with the best scores; None before the first validation
    stale    number of validations since the scores last improved
    skipped  number of skipped steps
    seconds  time spent on training
    curve    a row with the columns `CURVE_COLUMNS` for each validation, the first one before any step; missing values
             are None
    """

    step: int = 0
    best: int | None = None
    stale: int = 0
    skipped: int = 0
    seconds: float = 0.0
    curve: list[list[float | None]] = field(default_factory=list)

    def get_scores(self, row: int) -> ValidationScores:
        """Return the scores in a row of the curve."""
        loss, _, dice, *object_scores = self.curve[row][3:]
        f1, f1_strict, precision, recall = (value or 0.0 for value in object_scores[:4])
        # Rows of older checkpoints have no variation of information.
        voi = object_scores[4] if len(object_scores) > 4 else None
        return ValidationScores(math.inf if loss is None else loss, dice, f1, f1_strict, precision, recall, voi)

    def add_row(self, learning_rate: float, latest_loss: float | None, scores: ValidationScores) -> bool:
        """Add a validation to the curve. Return whether it is the best one so far."""
        best_scores = None if self.best is None else self.get_scores(self.best)
        loss = scores.loss if math.isfinite(scores.loss) else None
        self.curve.append([self.step, learning_rate, latest_loss, loss, self.skipped, *scores[1:]])
        is_best = scores.is_better_than(best_scores)
        if is_best:
            self.best, self.stale = len(self.curve) - 1, 0
        else:
            self.stale += 1
        return is_best

    def summarize(self) -> str:
        """Return a summary of the changes of the validation scores."""
        before, after = self.get_scores(0), self.get_scores(self.best or 0)
        skip_text = f", {self.skipped} steps skipped because of a non-finite loss or gradient" if self.skipped else ""
        return (
            f"{self.step} steps, F1 on the validation parts {before.f1:.2f} before, {after.f1:.2f} at best, validation"
            f" loss {format_number(before.loss)} before, {format_number(after.loss)} at that point{skip_text}"
        )


def format_number(value: float | None) -> str:
    """Format a number for users. Format missing values as a dash."""
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "-"
