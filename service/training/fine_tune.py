"""Fine-tuning of a model on annotated stacks: as from files, scored before and after on what it was not trained on."""

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
from service.models.repository import FILE_NAME, read_spec
from service.models.spec import Lineage, ModelSpec
from service.training.evaluate import Scores, score
from service.training.examples import LIMIT_BYTES, Pair, median_extents, zoom_pair
from service.training.from_files import choose_dtype, prepare_training
from service.training.model_folder import describe_stacks, draft_content, write_model
from service.training.training_loop import CHECKPOINT, Trainer

Widths = tuple[float, float, float]
Report = Callable[[dict[str, Any]], None]
"""Called with what is new, by its name: stage, steps, step and loss, validation, before."""

# Share of every stack that is held out, and fewest objects there that tell anything.
HELD_OUT, LEAST_OBJECTS = 0.2, 10
# Objects are resampled to the width of the model unless they have it but for so much, by no more than so much.
NEAR, MOST_ZOOM = 1.15, 3.0
MOST_VOXELS = 2**27
# Share of the time of a training that is for steps, the rest is for validations; and of all the time, at least, that is
# for the training, whatever reading and scoring take.
STEPS_SHARE, LEAST_SHARE = 0.8, 0.3
LEAST_STEPS, MOST_STEPS, VALIDATIONS = 4, 3000, 12


class Stack(NamedTuple):
    """Files of an annotated stack, its annotated part (None: all), and the width of objects where it is known."""

    name: str
    image: Path
    labels: Path
    region: tuple[slice, slice, slice] | None = None
    diameter: str | None = None


@dataclass(frozen=True)
class Annotated:
    """The annotated part of a stack.

    pair    image and labels [Z, Y, X]
    widths  of the objects along (z, y, x) in voxels; None without any object
    """

    name: str
    pair: Pair
    widths: Widths | None

    @property
    def objects(self) -> int:
        """Number of objects."""
        labels = self.pair[1]
        return int(np.count_nonzero(np.unique(labels)))


class FineTuning(NamedTuple):
    """What a training begins with, and where its results go.

    base      model whose weights it begins with
    out       folder of the new model
    settings  device, threads, precision and training options
    report    called with the news of the training
    """

    base: ModelSpec
    out: Path
    settings: Settings
    report: Report


class Outcome(NamedTuple):
    """A new model, and in a sentence or two whether it is better."""

    spec: ModelSpec
    lineage: Lineage
    message: str


def fine_tune(stacks: Sequence[Stack], task: FineTuning, *, minutes: float) -> Outcome:
    """Train for a number of minutes, scoring included, and make `task.out` a model folder of that name.

    No two stacks may have labels for the same place of one image: one would teach what the other holds out.
    Stacks are resampled to the width of objects that the model works at, as requests are. Device, threads and training
    options are those of the settings, but for the number of steps, which is what the time allows. Raises BadParameter,
    BadFile, BrokenModel, ConfigError.
    """
    base, out, settings, report = task
    began = time.monotonic()
    annotated = [read_stack(stack) for stack in stacks]
    parts, held_out, unseen = _hold_out(annotated, settings.training.validation, base.input.diameter)
    eager = override_settings(settings, "engine", {"kind": "eager", "precision": "fp32"})
    report({"stage": "scoring"})
    before = score_model(base, held_out, eager)
    report({"before": round(before.f1, 4)})
    scoring = time.monotonic() - began
    network, failure, content = _train(parts, task, max(60 * minutes - 2 * scoring, LEAST_SHARE * 60 * minutes))
    spec = write_model(network, content, out, _read_sample(base), settings)
    report({"stage": "evaluating"})
    after = score_model(spec, held_out, eager)
    better = (after.f1, after.f1_strict) > (before.f1, before.f1_strict)
    remark = (
        f"F1 at IoU 0.5 on {after.true} objects in a fifth of each annotated stack that was held out of the training."
        if unseen
        else f"F1 at IoU 0.5 on {after.true} objects that chose the weights during the training: too few are annotated"
        " to hold others out."
    )
    lineage = Lineage(
        parent=base.identifier,
        annotations=len(stacks),
        before=round(before.f1, 4),
        after=round(after.f1, 4),
        better=better,
        remark=remark,
    )
    return Outcome(_record(spec, lineage), lineage, _explain(lineage, failure, unseen=unseen))


def read_stack(stack: Stack) -> Annotated:
    """Read the annotated part of a stack. Raises BadFile, and BadParameter for unequal shapes."""
    image, labels = (stack_reader.read(path, Selection(), LIMIT_BYTES) for path in (stack.image, stack.labels))
    if image.shape != labels.shape:
        raise BadParameter(f"{stack.name}: image and labels differ in shape: {image.shape} and {labels.shape}.")
    part = stack.region or (slice(None),) * 3
    pair = image.array()[0][part], np.ascontiguousarray(labels.array()[0][part])
    return Annotated(stack.name, pair, _find_widths(stack, pair, image.voxel_size))


def _find_widths(stack: Stack, pair: Pair, voxel_size: VoxelSize | None) -> Widths | None:
    """Return the widths with which the corrected labels were made, else those of the annotated objects."""
    stated = None if stack.diameter is None else Diameter.parse(stack.diameter).in_voxels(voxel_size)
    extents = median_extents(pair[1])
    if stated is not None or extents is None:
        return stated
    z, y, x = extents.tolist()
    return z, y, x


def _hold_out(
    stacks: Sequence[Annotated], share: float, diameter: float | None
) -> tuple[list[Annotated], list[Annotated], bool]:
    """Return what is trained on, what is scored, and whether the training never sees the latter.

    Where too few objects are annotated, the part of validation is scored: of stacks that are resampled to `diameter`,
    the last `share` along the axis that is the longest then. Raises BadParameter without any object there.
    """
    usable = _select_usable(stacks, share, diameter)
    rest, held_out = map(list, zip(*(_cut(stack, HELD_OUT, diameter) for stack in usable), strict=True))
    enough = sum(part.objects for part in held_out) >= LEAST_OBJECTS
    if enough and all(_can_split(part, share, diameter) for part in rest):
        return rest, held_out, True
    return usable, [_cut(stack, share, diameter)[1] for stack in usable], False


def _select_usable(stacks: Sequence[Annotated], share: float, diameter: float | None) -> list[Annotated]:
    """Return the stacks that can be split. Raise BadParameter if there is none."""
    usable = [stack for stack in stacks if _can_split(stack, share, diameter)]
    if not usable:
        raise BadParameter(
            f"The annotated stacks have too few objects: some are needed in the first {1 - share:.0%} of a stack along"
            " its longest axis, and some in the rest. Annotate more."
        )
    return usable


def _can_split(stack: Annotated, share: float, diameter: float | None) -> bool:
    """Return whether both parts of a stack have objects."""
    return all(part.pair[1].any() for part in _cut(stack, share, diameter))


def _cut(stack: Annotated, share: float, diameter: float | None) -> tuple[Annotated, Annotated]:
    """Return the first part of a stack and the last `share`, along the longest axis once it is resampled."""
    image, labels = stack.pair
    axis = int(np.argmax(np.round(image.shape * find_factors(stack, diameter))))
    place = [round(image.shape[axis] * (1 - share))]
    images, numbers = np.split(image, place, axis), np.split(labels, place, axis)
    first, last = (replace(stack, pair=(images[side], numbers[side])) for side in (0, 1))
    return first, last


def score_model(spec: ModelSpec, stacks: Sequence[Annotated], settings: Settings) -> Scores:
    """Score a model on all objects of the stacks together, told how wide they are where the model takes that."""
    runner = ModelRunner(spec, settings)
    runner.warm_up()
    scores = []
    for stack in stacks:
        image, labels = stack.pair
        width = None if spec.input.diameter is None or stack.widths is None else Diameter(stack.widths, "px")
        volume = Volume.from_array(np.ascontiguousarray(image)[None])
        found = segment(runner, volume, Options(diameter=width)).segmentation
        scores.append(score(labels, found.pixels))
    return _join(scores)


def _join(scores: Sequence[Scores]) -> Scores:
    """Return the scores of several stacks as if they were one."""
    sizes = [each.true + each.found for each in scores]

    def mean(values: Sequence[float]) -> float:
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / max(sum(sizes), 1)

    return Scores(
        true=sum(each.true for each in scores),
        found=sum(each.found for each in scores),
        f1=mean([each.f1 for each in scores]),
        f1_strict=mean([each.f1_strict for each in scores]),
        iou=mean([each.iou for each in scores]),
        splits=sum(each.splits for each in scores),
        merges=sum(each.merges for each in scores),
    )


def _train(
    parts: Sequence[Annotated], task: FineTuning, seconds: float
) -> tuple[torch.nn.Module, str | None, dict[str, Any]]:
    """Train; return the network, why it is the one of the start, if it is, and the keys of its model file."""
    base, out, settings, report = task
    pairs = [resample(part, base.input.diameter) for part in parts]
    content = draft_content(base, out.name, [part.name for part in parts])
    # Everybody may see it, and names of stacks are their owners' own.
    content["training_data"] = f"{base.training_data} Then: {describe_stacks(len(parts))}."
    dtype = choose_dtype(settings)
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    probe = prepare_training(pairs, settings, content, base)(out, dtype)
    pace = max(statistics.median(probe.time_step() for _ in range(3)), 1e-3)
    left = max(seconds - (time.monotonic() - began), LEAST_SHARE * seconds)
    steps = min(max(round(STEPS_SHARE * left / pace), LEAST_STEPS), MOST_STEPS)
    report({"stage": "learning", "steps": steps})
    timed = {"steps": steps, "every": -(-steps // VALIDATIONS), "minutes": left / 60}
    make_trainer = prepare_training(pairs, override_settings(settings, "training", timed), content, base)
    trainer = make_trainer(out, dtype)
    trainer.follow = _Follower(report)
    network = trainer.run()
    (out / CHECKPOINT).unlink(missing_ok=True)
    return network, trainer.state.describe_failure(), content


def _read_sample(base: ModelSpec) -> NDArray[Any] | None:
    """Return the image of the parent's sample, [Z, Y, X]; None where it has none.

    Everybody who may use a model sees its sample, so that it must not be a part of an annotated stack.
    """
    if base.sample is None:
        return None
    sample: NDArray[Any] = stack_reader.read(base.folder / base.sample.input, Selection(), LIMIT_BYTES).array()[0]
    return sample


def find_factors(stack: Annotated, diameter: float | None) -> NDArray[np.float64]:
    """Return the factors along (z, y, x) by which a stack is resampled to objects about `diameter` voxels wide.

    All are 1 where that is None, the width of its objects is not known, or it is about that already.
    """
    if diameter is None or stack.widths is None:
        return np.ones(3)
    factors = np.clip(diameter / np.asarray(stack.widths), 1 / MOST_ZOOM, MOST_ZOOM)
    return np.ones(3) if np.all((factors < NEAR) & (factors > 1 / NEAR)) else factors


def resample(stack: Annotated, diameter: float | None) -> Pair:
    """Return image and labels resampled by `find_factors`. Raises BadParameter where these are too large."""
    image, labels = stack.pair
    factors = find_factors(stack, diameter)
    if np.all(factors == 1):
        return stack.pair
    if image.size * np.prod(factors) > MOST_VOXELS:
        raise BadParameter(
            f"{stack.name}: with objects resampled to the model's {diameter:g} voxels it has more than"
            f" {MOST_VOXELS:,} voxels; keep a smaller part."
        )
    return zoom_pair(image, labels, factors)


class _Follower:
    """Reports the progress of a trainer."""

    def __init__(self, report: Report) -> None:
        self._report, self._rounds, self._step = report, 0, 0

    def __call__(self, trainer: Trainer) -> None:
        state = trainer.state
        if trainer.finishing:
            self._report({"stage": "finishing"})
        for step, _, _, value, *_ in state.curve[self._rounds :]:
            self._report({"validation": [step, value]})
        self._rounds = len(state.curve)
        if state.step > self._step and trainer.loss is not None:
            self._report({"step": state.step, "loss": trainer.loss})
        self._step = state.step


def _record(spec: ModelSpec, lineage: Lineage) -> ModelSpec:
    """Add the lineage to the model file."""
    path = spec.folder / FILE_NAME
    content = yaml.safe_load(path.read_text(encoding="utf-8")) | {"lineage": lineage.model_dump()}
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return read_spec(spec.folder)


def _explain(lineage: Lineage, failure: str | None, *, unseen: bool) -> str:
    """Return what came out, for whoever asked for the training."""
    scores = f"F1 {lineage.before:.2f} before, {lineage.after:.2f} after"
    if lineage.better:
        text = f"The new model is better on the annotated stacks: {scores}."
    else:
        text = f"The new model is not better: {scores}. Correct more objects, or train for longer."
    if failure is not None:
        text += " It is the model that it began with: nothing learned was better on what was held out."
    return text if unseen else f"{text} Scored on objects that chose its weights, as too few are annotated."
