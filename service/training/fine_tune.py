"""Training on annotated stacks, with scores on held-out parts before and after training.

The command line and the service train with the same function. Stacks are normalized and resampled as in requests.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Objects, Selection
from service.formats import stack_reader
from service.models.loader import load_network
from service.models.repository import MODEL_FILE_NAME
from service.models.spec import Lineage, ModelSpec, TargetName, get_target
from service.models.spec_parts import Boundaries, Instances
from service.training.examples import MAX_DECODED_BYTES
from service.training.loop.confidence_calibration import calibrate
from service.training.loop.object_scores import ObjectCounts
from service.training.loop.setup import TrainerFactory, choose_dtype, make_draft_spec, prepare_training
from service.training.loop.trainer import CHECKPOINT_FILE, Trainer
from service.training.loop.validation import score_parts
from service.training.model_folder import SampleSource, draft_model, write_model
from service.training.stacks.annotated_stack import AnnotatedStack, check_background
from service.training.stacks.parts import HeldOutParts, hold_out_parts, resample_stack

log = logging.getLogger("service.train")

ProgressCallback = Callable[[dict[str, Any]], None]
"""A callback for messages, each with one or more of the members stage, steps, step, loss, validation and before."""

# Minimum fraction of the requested time that is spent on steps, no matter how long preparing and scoring take.
MIN_TRAINING_TIME_FRACTION = 0.3
# Number of times that parts are scored after the last step: to choose the weights, and for the final comparison.
FINAL_SCORING_COUNT = 4
# Maximum number of steps if the time is limited.
MAX_STEPS = 10_000
# Maximum number of steps per object to train on, and its lower limit, if the time is limited and there is a base model.
# Each step sees about 40 objects. With more steps, a model learns the objects by heart, and other stacks suffer.
STEPS_PER_OBJECT = 15
MIN_STEP_LIMIT, MAX_STEP_LIMIT = 300, 3000
# Number of validations during training if the time is limited.
VALIDATION_COUNT = 12
# Number of batches for the batch normalization statistics if the time is limited.
STATISTICS_BATCHES = 16
# Number of objects to train on below which more annotated objects are likely to help.
FEW_OBJECTS = 200

# Fraction of planes without labels above which a message asks whether these planes are annotated.
MAX_EMPTY_PLANES_FRACTION = 0.5


class FineTuningTask(NamedTuple):
    """The base model, the output folder and the settings for training.

    base           model that provides the initial weights; None for random weights
    output_folder  folder of the new model
    settings       device, threads, precision and training options; `training.minutes` includes preparing and scoring
    report         callback for progress messages
    is_private     whether the model file must not contain the names and the pixels of the stacks
    target         what the new model learns; None for the same as the base model
    keeps_worse    whether the new model is kept even if it is not better than its base model
    resumes        whether to continue from the checkpoint in the output folder
    """

    base: ModelSpec | None
    output_folder: Path
    settings: Settings
    report: ProgressCallback
    is_private: bool = True
    target: TargetName | None = None
    keeps_worse: bool = False
    resumes: bool = False


@dataclass(frozen=True)
class FineTuningResult:
    """The result of training.

    spec           the new model; None if it is not better than the base model and was therefore deleted
    before, after  scores of the base model and of the new model on the same held-out parts
    message        the outcome and, if there is no new model, what to do
    summary        number of steps and validation scores
    """

    spec: ModelSpec | None
    before: ObjectCounts
    after: ObjectCounts
    message: str
    summary: str

    @property
    def is_better(self) -> bool:
        """Whether the new model finds more objects than its base model."""
        return is_better(self.after, self.before)


def is_better(after: ObjectCounts, before: ObjectCounts) -> bool:
    """Return whether the F1 score at an IoU of 0.5 increased, or the one at 0.7 if the first one is equal.

    Models that predict boundaries are compared by the F1 score minus the variation of information.
    """
    if after.partition_rating is not None and before.partition_rating is not None:
        return after.partition_rating > before.partition_rating
    return (after.f1, after.f1_strict) > (before.f1, before.f1_strict)


def fine_tune(stacks: Sequence[AnnotatedStack], task: FineTuningTask) -> FineTuningResult:
    """Train on annotated stacks, and create the model folder `task.output_folder` if the new model is better.

    The stacks must not overlap. Otherwise, training data would leak into the held-out data. The model file of the new
    model states the object diameter of the stacks, which is used for requests that do not specify a diameter. Raises
    BadParameter, BadFile, BrokenModel and ConfigError.
    """
    start_time = time.monotonic()
    name, is_private = task.output_folder.name, task.is_private
    content = draft_model(stacks, task.base, name, is_private=is_private, target=task.target)
    draft = make_draft_spec(content)
    if isinstance(draft.decoding, Instances):
        check_background(stacks)
    parts = hold_out_parts(
        [resample_stack(stack, draft) for stack in stacks],
        task.settings.training.validation,
        has_large_objects=isinstance(draft.decoding, Boundaries),
    )
    make_trainer = prepare_training(parts, task.settings, draft, task.base)
    task.output_folder.mkdir(parents=True, exist_ok=True)
    trainer, before = _make_scored_trainer(make_trainer, parts, draft, task, start_time)
    network = trainer.run()
    task.report({"stage": "evaluating"})
    content |= {"decoding": trainer.best_decoding.model_dump(mode="json")}
    draft = make_draft_spec(content)
    after, held_out_objects = score_parts(lambda images: network(images).float(), parts.test, draft)
    (task.output_folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    summary = trainer.state.summarize()
    if not (is_better(after, before) or task.keeps_worse):
        shutil.rmtree(task.output_folder)
        can_train_longer = trainer.state.step < _limit_steps(parts, draft, task.base)
        message = _describe_failure(before, after, parts, draft, can_train_longer=can_train_longer)
        message += _describe_empty_planes(stacks)
        return FineTuningResult(None, before, after, message, summary)
    if task.base is not None:
        content |= _describe_origin(before, after, parts, len(stacks), task.base)
        if isinstance(draft.decoding, Instances):
            content |= _calibrate(task.base, held_out_objects, after)
    sample = _read_base_sample(task.base, draft) if task.is_private else _choose_sample(stacks[0])
    spec = write_model(network, content, task.output_folder, sample, task.settings)
    message = _describe_success(before, after, parts) + _describe_empty_planes(stacks)
    return FineTuningResult(spec, before, after, message, summary)


def check_output_folder(folder: Path, *, resumes: bool) -> None:
    """Raise BadParameter if a folder contains a model, or other files that training would replace."""
    if (folder / MODEL_FILE_NAME).exists() or (folder.exists() and any(folder.iterdir()) and not resumes):
        raise BadParameter(
            f"{folder} is not empty. Choose another folder, or use --resume to continue unfinished training."
        )


def _make_scored_trainer(
    make_trainer: TrainerFactory, parts: HeldOutParts, draft: ModelSpec, task: FineTuningTask, start_time: float
) -> tuple[Trainer, ObjectCounts]:
    """Return a trainer whose plan fits the available time, and the scores of the base model on the test parts."""
    settings, dtype, report = task.settings, choose_dtype(task.settings), task.report
    report({"stage": "scoring"})
    scoring_start = time.monotonic()
    probe_trainer = make_trainer(settings, task.output_folder, dtype)
    before = _score_base(probe_trainer, parts, draft, task.base)
    scoring_seconds = time.monotonic() - scoring_start
    report({"before": round(before.f1, 4)})
    log.info("%s before training: %s", "base model" if task.base else "random weights", before.describe())
    minutes = settings.training.minutes
    if minutes is not None:
        used_seconds = time.monotonic() - start_time + FINAL_SCORING_COUNT * scoring_seconds
        seconds = max(60 * minutes - used_seconds, MIN_TRAINING_TIME_FRACTION * 60 * minutes)
        max_steps = min(settings.training.steps, _limit_steps(parts, draft, task.base))
        log.info("training for at most %d steps, or %.0f s", max_steps, seconds)
        options = {"steps": max_steps, "every": -(-max_steps // VALIDATION_COUNT), "minutes": seconds / 60}
        settings = override_settings(settings, "training", options)
    del probe_trainer
    trainer = make_trainer(settings, task.output_folder, dtype)
    if minutes is not None:
        trainer.plan = trainer.plan.model_copy(update={"statistics": STATISTICS_BATCHES})
    if task.resumes:
        trainer.resume()
    report({"stage": "learning", "steps": trainer.plan.steps})
    trainer.on_progress = _ProgressReporter(report, trainer.plan.steps)
    return trainer, before


def _score_base(trainer: Trainer, parts: HeldOutParts, draft: ModelSpec, base: ModelSpec | None) -> ObjectCounts:
    """Return the scores of the base model, or of the random weights of the trainer, on the test parts.

    If the new model has other outputs, the base model is run with its own outputs and decoding.
    """
    if base is None or get_target(base) == get_target(draft):
        return score_parts(trainer.compute_candidate_scores, parts.test, draft)[0]
    network = load_network(base)
    return score_parts(lambda images: network(images).float(), parts.test, base)[0]


def _limit_steps(parts: HeldOutParts, draft: ModelSpec, base: ModelSpec | None) -> int:
    """Return the maximum number of steps if the time is limited."""
    if base is None or get_target(base) != get_target(draft):
        return MAX_STEPS
    object_count = sum(part.object_count for part in parts.training)
    return min(max(STEPS_PER_OBJECT * object_count, MIN_STEP_LIMIT), MAX_STEP_LIMIT)


def _choose_sample(stack: AnnotatedStack) -> SampleSource:
    return SampleSource(stack.volume.read_all()[0][stack.region], stack.labels, stack.volume.voxel_size)


def _read_base_sample(base: ModelSpec | None, draft: ModelSpec) -> SampleSource | None:
    """Return the sample of the base model, or None. Its objects have the default diameter of the new model."""
    # All users of a model can see its sample, so the sample must not contain a part of an annotated stack.
    if base is None or base.sample is None:
        return None
    path = base.folder / base.sample.input
    volume, diameter = stack_reader.read(path, Selection(), MAX_DECODED_BYTES), draft.input.usual_diameter
    voxel_size = volume.voxel_size
    if diameter is not None and diameter.unit == "um" and draft.input.diameter is not None:
        z, y, x = (length / draft.input.diameter for length in diameter.lengths)
        voxel_size = VoxelSize(z, y, x)
    return SampleSource(volume.read_all()[0], voxel_size=voxel_size)


class _ProgressReporter:
    """A callback that reports the progress of a trainer, and how many steps are likely to be done at the end."""

    def __init__(self, report: ProgressCallback, expected_step_count: int) -> None:
        self._report, self._expected_step_count = report, expected_step_count
        self._reported_validation_count = self._reported_step = 0

    def __call__(self, trainer: Trainer) -> None:
        state = trainer.state
        if trainer.is_finishing:
            self._report({"stage": "finishing"})
        for row in state.curve[self._reported_validation_count :]:
            self._report({"validation": [row[0], row[3]], "f1": [row[0], row[6]]})
        self._reported_validation_count = len(state.curve)
        if state.step > self._reported_step and trainer.latest_loss is not None:
            self._report({"step": state.step, "loss": trainer.latest_loss})
            expected_step_count = max(round(state.step / trainer.progress), state.step)
            if expected_step_count != self._expected_step_count:
                self._report({"steps": expected_step_count})
                self._expected_step_count = expected_step_count
        self._reported_step = state.step


def _calibrate(base: ModelSpec, held_out_objects: Sequence[Objects], after: ObjectCounts) -> dict[str, Any]:
    """Return the part of the model file with the calibration of the confidence, if the base model has one."""
    if base.confidence is None or base.input.diameter is None:
        return {}
    calibration = calibrate(base.confidence, held_out_objects, base.input.diameter, after.f1)
    return {} if calibration is None else {"confidence": calibration.model_dump()}


def _describe_origin(
    before: ObjectCounts, after: ObjectCounts, parts: HeldOutParts, stack_count: int, base: ModelSpec
) -> dict[str, Any]:
    """Return the part of the model file about the base model and the scores."""
    remark = (
        f"F1 at IoU 0.5 on {after.true} objects in the held-out fifth of each annotated stack."
        if parts.has_separate_test
        else f"F1 at IoU 0.5 on {after.true} objects that were also used to select the weights, because there are too"
        " few annotated objects for a separate test set."
    )
    lineage = Lineage(
        parent=base.identifier,
        annotations=stack_count,
        before=round(before.f1, 4),
        after=round(after.f1, 4),
        better=is_better(after, before),
        remark=remark,
    )
    return {"lineage": lineage.model_dump()}


def _describe_success(before: ObjectCounts, after: ObjectCounts, parts: HeldOutParts) -> str:
    """Return a message about a model that is kept."""
    outcome = "is better" if is_better(after, before) else "is not better, but was kept"
    return (
        f"The new model {outcome} on {_count_held_out(after)}: before training, {before.describe()}; after"
        f" training, {after.describe()}.{_describe_reuse(parts)}"
    )


def _describe_failure(
    before: ObjectCounts, after: ObjectCounts, parts: HeldOutParts, draft: ModelSpec, *, can_train_longer: bool
) -> str:
    """Return a message with advice about a model that is not kept."""
    advice = []
    if draft.input.default_diameter is not None:
        advice.append(
            f"use the base model with diameter={draft.input.default_diameter}, which was also used for both scores"
        )
    training_count = sum(part.object_count for part in parts.training)
    if training_count < FEW_OBJECTS:
        advice.append(f"annotate more objects, because there are only {training_count} to train on")
    if can_train_longer:
        advice.append("train for longer")
    advice.append("start from another model")
    return (
        f"The new model is not better than the base model on {_count_held_out(after)}, so it was not kept: before"
        f" training, {before.describe()}; after training, {after.describe()}. What to try: {'; '.join(advice)}."
        f"{_describe_reuse(parts)}"
    )


def _count_held_out(after: ObjectCounts) -> str:
    return f"{after.true} held-out object{'s' * (after.true != 1)}"


def _describe_empty_planes(stacks: Sequence[AnnotatedStack]) -> str:
    """Return a warning if most planes of a stack have no labels, because they are probably not annotated."""
    for stack in stacks:
        has_labels = np.asarray(stack.labels.any(axis=(1, 2)))
        empty_count = len(has_labels) - int(np.count_nonzero(has_labels))
        if stack.unknown is None and empty_count > MAX_EMPTY_PLANES_FRACTION * len(has_labels):
            return (
                f" {empty_count} of {len(has_labels)} planes of a stack have no labels and were used as background. If"
                " they are not annotated, train again with --partial-planes (partial_planes in requests)."
            )
    return ""


def _describe_reuse(parts: HeldOutParts) -> str:
    if parts.has_separate_test:
        return ""
    return " Too few objects are annotated, so the scored objects were also used to select the weights."
