"""Fine-tuning of a model on annotated stacks, with scores on held-out data before and after training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from service.core.config import Settings, override_settings
from service.core.errors import BadParameter
from service.core.quantities import Diameter, VoxelSize
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.repository import MODEL_FILE_NAME, read_spec
from service.models.spec import Lineage, ModelSpec
from service.training.evaluate import Scores, score
from service.training.examples import MAX_DECODED_BYTES, Pair, compute_median_extents, zoom_pair
from service.training.from_files import choose_dtype, prepare_training
from service.training.model_folder import describe_stacks, draft_content, write_model
from service.training.training_loop import CHECKPOINT_FILE, Trainer

Extents = tuple[float, float, float]
ProgressCallback = Callable[[dict[str, Any]], None]
"""A callback for messages, each with one or more of the members stage, steps, step, loss, validation and before."""

# Fraction of each stack that is held out for scoring.
HELD_OUT_FRACTION = 0.2
# Minimum number of objects in the held-out parts. With fewer objects, the scores would not be meaningful.
MIN_HELD_OUT_OBJECTS = 10
# Stacks are not resampled if their object diameter is within this factor of the model's object diameter.
RESAMPLING_TOLERANCE = 1.15
# Maximum factor by which stacks are enlarged or reduced.
MAX_ZOOM = 3.0
# Maximum number of voxels of a resampled stack.
MAX_RESAMPLED_VOXELS = 2**27
# Fraction of the training time that is reserved for steps. The rest is for validation.
STEPS_TIME_FRACTION = 0.8
# Minimum fraction of the requested time that is spent on training, no matter how long reading and scoring take.
MIN_TRAINING_TIME_FRACTION = 0.3
MIN_STEPS = 4
MAX_STEPS = 3000
# Number of validations during training.
VALIDATION_COUNT = 12


class StackFiles(NamedTuple):
    """The files of an annotated stack, its annotated region (None for the whole stack), and the object diameter."""

    name: str
    image: Path
    labels: Path
    region: tuple[slice, slice, slice] | None = None
    diameter: str | None = None


@dataclass(frozen=True)
class AnnotatedStack:
    """The annotated region of a stack.

    pair     image and labels [Z, Y, X]
    extents  object diameter along (z, y, x) in voxels; None if there are no objects
    """

    name: str
    pair: Pair
    extents: Extents | None

    @property
    def object_count(self) -> int:
        labels = self.pair[1]
        return int(np.count_nonzero(np.unique(labels)))


class FineTuningTask(NamedTuple):
    """The base model, the output folder and the settings for fine-tuning.

    base           model that provides the initial weights
    output_folder  folder of the new model
    settings       device, threads, precision and training options
    report         callback for progress messages
    """

    base: ModelSpec
    output_folder: Path
    settings: Settings
    report: ProgressCallback


class FineTuningResult(NamedTuple):
    """A new model, and a message about whether the model is better than its base model."""

    spec: ModelSpec
    lineage: Lineage
    message: str


def fine_tune(stacks: Sequence[StackFiles], task: FineTuningTask, *, minutes: float) -> FineTuningResult:
    """Train for `minutes`, including the time for scoring, and create the model folder `task.output_folder`.

    The stacks must not overlap. Otherwise, training data would leak into the held-out data. Stacks are resampled to the
    object diameter of the model, as in requests. The number of steps depends on the available time. All other options
    are taken from the settings. Raises BadParameter, BadFile, BrokenModel and ConfigError.
    """
    base, output_folder, settings, report = task
    start_time = time.monotonic()
    all_stacks = [read_stack(stack) for stack in stacks]
    training_parts, scored_parts, has_held_out_data = _hold_out_parts(
        all_stacks, settings.training.validation, base.input.diameter
    )
    eager_settings = override_settings(settings, "engine", {"kind": "eager", "precision": "fp32"})
    report({"stage": "scoring"})
    base_scores = score_model(base, scored_parts, eager_settings)
    report({"before": round(base_scores.f1, 4)})
    scoring_seconds = time.monotonic() - start_time
    network, failure, content = _train_network(
        training_parts, task, max(60 * minutes - 2 * scoring_seconds, MIN_TRAINING_TIME_FRACTION * 60 * minutes)
    )
    spec = write_model(network, content, output_folder, _read_sample(base), settings)
    report({"stage": "evaluating"})
    new_scores = score_model(spec, scored_parts, eager_settings)
    is_better = (new_scores.f1, new_scores.f1_strict) > (base_scores.f1, base_scores.f1_strict)
    remark = (
        f"F1 at IoU 0.5 on {new_scores.true} objects in the held-out fifth of each annotated stack."
        if has_held_out_data
        else f"F1 at IoU 0.5 on {new_scores.true} objects that were also used to select the weights, because there are"
        " too few annotated objects for a separate test set."
    )
    lineage = Lineage(
        parent=base.identifier,
        annotations=len(stacks),
        before=round(base_scores.f1, 4),
        after=round(new_scores.f1, 4),
        better=is_better,
        remark=remark,
    )
    return FineTuningResult(
        _add_lineage(spec, lineage), lineage, _describe_result(lineage, failure, has_held_out_data=has_held_out_data)
    )


def read_stack(stack: StackFiles) -> AnnotatedStack:
    """Read the annotated region of a stack. Raises BadFile, or BadParameter if the shapes differ."""
    image, labels = (stack_reader.read(path, Selection(), MAX_DECODED_BYTES) for path in (stack.image, stack.labels))
    if image.shape != labels.shape:
        raise BadParameter(f"{stack.name}: the image and the labels differ in shape: {image.shape} and {labels.shape}.")
    region = stack.region or (slice(None),) * 3
    pair = image.read_all()[0][region], np.ascontiguousarray(labels.read_all()[0][region])
    return AnnotatedStack(stack.name, pair, _find_extents(stack, pair, image.voxel_size))


def _find_extents(stack: StackFiles, pair: Pair, voxel_size: VoxelSize | None) -> Extents | None:
    """Return the diameter that was used to segment the stack, or the median extents of the annotated objects."""
    diameter = None if stack.diameter is None else Diameter.parse(stack.diameter).to_voxels(voxel_size)
    extents = compute_median_extents(pair[1])
    if diameter is not None or extents is None:
        return diameter
    z, y, x = extents.tolist()
    return z, y, x


def _hold_out_parts(
    stacks: Sequence[AnnotatedStack], validation_fraction: float, diameter: float | None
) -> tuple[list[AnnotatedStack], list[AnnotatedStack], bool]:
    """Return the parts for training, the parts for scoring, and whether the parts for scoring are held out of training.

    If there are too few objects, the validation part is scored: the last `validation_fraction` along the longest axis
    after resampling to `diameter`. Raises BadParameter if that part contains no objects.
    """
    usable_stacks = _select_stacks(stacks, validation_fraction, diameter)
    training_parts, held_out_parts = map(
        list, zip(*(_split_stack(stack, HELD_OUT_FRACTION, diameter) for stack in usable_stacks), strict=True)
    )
    has_enough_objects = sum(part.object_count for part in held_out_parts) >= MIN_HELD_OUT_OBJECTS
    if has_enough_objects and all(_can_split(part, validation_fraction, diameter) for part in training_parts):
        return training_parts, held_out_parts, True
    return usable_stacks, [_split_stack(stack, validation_fraction, diameter)[1] for stack in usable_stacks], False


def _select_stacks(stacks: Sequence[AnnotatedStack], fraction: float, diameter: float | None) -> list[AnnotatedStack]:
    """Return the stacks that can be split. Raises BadParameter if there are none."""
    usable_stacks = [stack for stack in stacks if _can_split(stack, fraction, diameter)]
    if not usable_stacks:
        raise BadParameter(
            f"The annotated stacks contain too few objects. At least one stack must contain objects both in the first"
            f" {1 - fraction:.0%} along its longest axis and in the rest. Annotate more objects."
        )
    return usable_stacks


def _can_split(stack: AnnotatedStack, fraction: float, diameter: float | None) -> bool:
    """Return whether both parts of a stack contain objects."""
    return all(part.pair[1].any() for part in _split_stack(stack, fraction, diameter))


def _split_stack(
    stack: AnnotatedStack, fraction: float, diameter: float | None
) -> tuple[AnnotatedStack, AnnotatedStack]:
    """Split off the last `fraction` of a stack along the axis that is longest after resampling. Return both parts."""
    image, labels = stack.pair
    axis = int(np.argmax(np.round(image.shape * compute_zoom_factors(stack, diameter))))
    split_indices = [round(image.shape[axis] * (1 - fraction))]
    image_parts, label_parts = np.split(image, split_indices, axis), np.split(labels, split_indices, axis)
    first_part, last_part = (replace(stack, pair=(image_parts[index], label_parts[index])) for index in (0, 1))
    return first_part, last_part


def score_model(spec: ModelSpec, stacks: Sequence[AnnotatedStack], settings: Settings) -> Scores:
    """Score a model on the objects of all stacks together. Pass an object diameter if the model supports diameters."""
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    scores = []
    for stack in stacks:
        image, labels = stack.pair
        diameter = None if spec.input.diameter is None or stack.extents is None else Diameter(stack.extents, "px")
        volume = Volume.from_array(np.ascontiguousarray(image)[None])
        segmentation = segment(runner, volume, Options(diameter=diameter)).segmentation
        scores.append(score(labels, segmentation.pixels))
    return _combine_scores(scores)


def _combine_scores(scores: Sequence[Scores]) -> Scores:
    """Sum the counts of several stacks, and average the other scores, weighted by the number of objects."""
    counts = [stack_scores.true + stack_scores.found for stack_scores in scores]

    def compute_mean(values: Sequence[float]) -> float:
        return sum(value * count for value, count in zip(values, counts, strict=True)) / max(sum(counts), 1)

    return Scores(
        true=sum(stack_scores.true for stack_scores in scores),
        found=sum(stack_scores.found for stack_scores in scores),
        f1=compute_mean([stack_scores.f1 for stack_scores in scores]),
        f1_strict=compute_mean([stack_scores.f1_strict for stack_scores in scores]),
        iou=compute_mean([stack_scores.iou for stack_scores in scores]),
        splits=sum(stack_scores.splits for stack_scores in scores),
        merges=sum(stack_scores.merges for stack_scores in scores),
    )


def _train_network(
    training_parts: Sequence[AnnotatedStack], task: FineTuningTask, max_seconds: float
) -> tuple[torch.nn.Module, str | None, dict[str, Any]]:
    """Return the trained network, a message if the loss did not improve (else None), and the model file's content."""
    base, output_folder, settings, report = task
    pairs = [resample_stack(part, base.input.diameter) for part in training_parts]
    content = draft_content(base, output_folder.name, [part.name for part in training_parts])
    # All clients can see this description. Stack names are private, so replace them with the number of stacks.
    content["training_data"] = f"{base.training_data} Then: {describe_stacks(len(training_parts))}."
    dtype = choose_dtype(settings)
    start_time = time.monotonic()
    output_folder.mkdir(parents=True, exist_ok=True)
    probe_trainer = prepare_training(pairs, settings, content, base)(output_folder, dtype)
    seconds_per_step = max(statistics.median(probe_trainer.measure_step() for _ in range(3)), 1e-3)
    seconds_left = max(max_seconds - (time.monotonic() - start_time), MIN_TRAINING_TIME_FRACTION * max_seconds)
    step_count = min(max(round(STEPS_TIME_FRACTION * seconds_left / seconds_per_step), MIN_STEPS), MAX_STEPS)
    report({"stage": "learning", "steps": step_count})
    timed_options = {"steps": step_count, "every": -(-step_count // VALIDATION_COUNT), "minutes": seconds_left / 60}
    make_trainer = prepare_training(pairs, override_settings(settings, "training", timed_options), content, base)
    trainer = make_trainer(output_folder, dtype)
    trainer.on_progress = _ProgressReporter(report)
    network = trainer.run()
    (output_folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return network, trainer.state.describe_failure(), content


def _read_sample(base: ModelSpec) -> NDArray[Any] | None:
    """Return the image [Z, Y, X] of the sample of the base model, or None."""
    # All users of a model can see its sample, so the sample must not contain a part of an annotated stack.
    if base.sample is None:
        return None
    sample: NDArray[Any] = stack_reader.read(
        base.folder / base.sample.input, Selection(), MAX_DECODED_BYTES
    ).read_all()[0]
    return sample


def compute_zoom_factors(stack: AnnotatedStack, diameter: float | None) -> NDArray[np.float64]:
    """Return the factors along (z, y, x) that resample a stack to an object diameter of about `diameter` voxels.

    The factors are 1 if `diameter` is None, or if the diameter of the objects is unknown or close to `diameter`.
    """
    if diameter is None or stack.extents is None:
        return np.ones(3)
    factors = np.clip(diameter / np.asarray(stack.extents), 1 / MAX_ZOOM, MAX_ZOOM)
    return np.ones(3) if np.all((factors < RESAMPLING_TOLERANCE) & (factors > 1 / RESAMPLING_TOLERANCE)) else factors


def resample_stack(stack: AnnotatedStack, diameter: float | None) -> Pair:
    """Resample image and labels to an object diameter. Raises BadParameter if the result would be too large."""
    image, labels = stack.pair
    factors = compute_zoom_factors(stack, diameter)
    if np.all(factors == 1):
        return stack.pair
    if image.size * np.prod(factors) > MAX_RESAMPLED_VOXELS:
        raise BadParameter(
            f"{stack.name}: after resampling to the model's object diameter of {diameter:g} voxels, the stack has more"
            f" than {MAX_RESAMPLED_VOXELS:,} voxels. Annotate a smaller region."
        )
    return zoom_pair(image, labels, factors)


class _ProgressReporter:
    """A callback that reports the progress of a trainer."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report, self._reported_validation_count, self._reported_step = report, 0, 0

    def __call__(self, trainer: Trainer) -> None:
        state = trainer.state
        if trainer.is_finishing:
            self._report({"stage": "finishing"})
        for step, _, _, validation_loss, *_ in state.curve[self._reported_validation_count :]:
            self._report({"validation": [step, validation_loss]})
        self._reported_validation_count = len(state.curve)
        if state.step > self._reported_step and trainer.latest_loss is not None:
            self._report({"step": state.step, "loss": trainer.latest_loss})
        self._reported_step = state.step


def _add_lineage(spec: ModelSpec, lineage: Lineage) -> ModelSpec:
    """Add the lineage to the model file, and return the updated spec."""
    path = spec.folder / MODEL_FILE_NAME
    content = yaml.safe_load(path.read_text(encoding="utf-8")) | {"lineage": lineage.model_dump()}
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return read_spec(spec.folder)


def _describe_result(lineage: Lineage, failure: str | None, *, has_held_out_data: bool) -> str:
    """Return a message about the result of fine-tuning."""
    score_text = f"F1 {lineage.before:.2f} before, {lineage.after:.2f} after"
    if lineage.better:
        message = f"The new model is better on the annotated stacks: {score_text}."
    else:
        message = f"The new model is not better: {score_text}. Correct more objects, or train for longer."
    if failure is not None:
        message += " It has the weights of the base model, because the validation loss did not improve."
    return (
        message
        if has_held_out_data
        else f"{message} Too few objects are annotated, so the scored objects were also used to select the weights."
    )
