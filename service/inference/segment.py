"""Volume -> Segmentation, in a straight line: normalise, size, resample, windows, decode, judge."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from service.core.errors import Cancelled, DoubtfulResult, StackSegError
from service.core.quantities import Diameter
from service.core.telemetry import Stages
from service.core.types import Options, Segmentation, Steering, Volume
from service.inference.decoding.decoders import Decoder, make_decoder
from service.inference.decoding.steering import minimum_voxels, steer
from service.inference.diameter.advice import Evidence
from service.inference.diameter.confidence import Judgement, judge_objects
from service.inference.diameter.places import strongest_windows
from service.inference.diameter.sizing import SizedRequest, measure_diameter, plan_by_diameter
from service.inference.preprocessing.empty_windows import Skipping, make_filter
from service.inference.preprocessing.normalize import NormalisedImage, normalise_volume
from service.inference.preprocessing.resample import resample_image, resample_segmentation, used_width
from service.inference.runner.callbacks import Callbacks
from service.inference.types import Plan, PlannedRequest, Result, Sizing
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image
from service.models.spec import ModelSpec

if TYPE_CHECKING:
    from service.inference.runner.model_runner import ModelRunner
    from service.inference.runner.scoring import Scored

ALONE = Callbacks()
"""Callbacks of a caller that waits for the result in its own thread, and computes the windows there."""

log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """One call of `segment`: what it was given, and the seconds of its stages so far."""

    runner: ModelRunner
    volume: Volume
    options: Options
    callbacks: Callbacks
    stages: Stages


def segment(
    runner: ModelRunner,
    volume: Volume,
    options: Options,
    request: PlannedRequest | None = None,
    callbacks: Callbacks = ALONE,
) -> Result:
    """Segment one volume [C, Z, Y, X] on its own grid.

    request  what the runner's estimator has planned for the volume and the options; None: it is planned now

    Raises BadParameter for options or channels that do not fit, TooLarge for more windows than the operator allows,
    Cancelled once the callbacks say so between two batches, OutOfMemory, NonFiniteScores where even float32 gives NaN
    or infinity, DeviceLost, and DoubtfulResult where the options are strict.
    """
    request = request or runner.estimator.plan_request(volume, options)
    if options.roi_size is not None:
        other = runner.with_window(options, request.estimate)
        return segment(other, volume, replace(options, roi_size=None), request, callbacks)._replace(spec=runner.spec)
    call = _Call(runner, volume, options, callbacks, Stages())
    with runner.computing(request.estimate):
        runner.check_memory(request.estimate)
        with call.stages.measure("prepare"):
            source, notes = normalise_volume(volume, runner.spec, runner.placement.upload(volume))
        (plan, estimate), diameter, sizing_notes = _size(call, source, request)
        image, resampling_notes = _resample(call, source, plan)
        spec = steer(runner.spec, plan.steering, volume, as_size(image.shape[2:]))
        image, skipped, skipping_notes = _skip_empty_windows(call, image, spec, plan)
        callbacks.progress(0, estimate.windows)
        scored = _score(call, image, spec, plan)
        # Decoding needs their memory.
        del source, image
        segmentation = _decode(call, scored.consumer, plan)
        confidence, doubt = _judge(call, segmentation, plan, diameter)
    changes = (*sizing_notes, *resampling_notes, *skipping_notes, *runner.batch_notes(options), *scored.notes)
    return Result(
        segmentation,
        call.stages.seconds,
        (*notes, *changes, *volume.notes),
        scored.fallbacks,
        scored.recomputed,
        diameter,
        estimated=plan.estimated and diameter is not None,
        skipped=skipped,
        spec=runner.spec,
        engine=runner.describe_engine(recomputed=scored.recomputed),
        confidence=confidence,
        doubt=doubt,
    )


def _size(call: _Call, image: NormalisedImage, request: PlannedRequest) -> SizedRequest:
    """Estimate the diameter of the objects where the request leaves it open, and plan anew by it."""
    if not request.plan.estimated:
        return SizedRequest(request, request.plan.diameter)
    runner, volume = call.runner, call.volume

    def plan_with(diameter: Diameter) -> PlannedRequest:
        planned = runner.estimator.plan_request(volume, replace(call.options, diameter=diameter))
        runner.check_memory(planned.estimate)
        return planned

    with call.stages.measure("size"):
        sizing = _measure_diameter(call, image, request.plan)
        sized = plan_by_diameter(request, sizing, plan_with)
    call.callbacks.revised(sized.request.estimate)
    return sized


def _measure_diameter(call: _Call, image: NormalisedImage, plan: Plan) -> Sizing:
    """Return the diameter of the objects, from the cache where the runner has seen the same pixels before."""
    runner, volume = call.runner, call.volume
    score_windows = runner.score_windows(plan, call.callbacks.probe)
    return runner.diameters.get(volume, lambda: measure_diameter(image, volume, runner.spec, score_windows))


def _resample(call: _Call, source: NormalisedImage, plan: Plan) -> tuple[Image, tuple[str, ...]]:
    """Return the image on the grid of the network, read on its device, and notes."""
    with call.stages.measure("prepare"):
        prepared = resample_image(source, call.volume, call.runner.spec, plan.diameter)
        return call.runner.bring(prepared.image), prepared.notes


def _skip_empty_windows(call: _Call, image: Image, spec: ModelSpec, plan: Plan) -> Skipping:
    """Leave out windows without anything in them, where the plan says so; `spec` as it decodes the request."""
    if plan.skip_below is None:
        return Skipping(image, None)
    with call.stages.measure("skip"):
        score_windows = call.runner.score_windows(plan, call.callbacks.probe)
        return make_filter(image, spec, plan, score_windows).skip(call.volume, plan.skip_below)


def _score(call: _Call, image: Image, spec: ModelSpec, plan: Plan) -> Scored[Decoder]:
    """Compute the scores of all windows, and decode them as far as they have come."""
    runner, size = call.runner, as_size(image.shape[2:])
    make = partial(make_decoder, spec, size, plan.output, call.volume.voxel_size, runner.allocate)
    compute = partial(
        runner.choose_inferer(call.callbacks.run),
        cancelled=call.callbacks.cancelled,
        progress=lambda done, total: call.callbacks.progress(done * plan.scorings, total * plan.scorings),
    )
    return runner.scores.compute(image, plan, runner.placement.choose_decoder(make, plan), call.stages, compute)


def _decode(call: _Call, decoder: Decoder, plan: Plan) -> Segmentation:
    """Return the segmentation on the grid of the volume, once its decoder has all scores."""
    with call.stages.measure("decode"):
        least = minimum_voxels(plan.steering, call.volume)
        return resample_segmentation(decoder.finish(), call.volume.shape[1:], least)


def _judge(call: _Call, segmentation: Segmentation, plan: Plan, diameter: Diameter | None) -> Judgement:
    """Return the confidence in the labels, and the reason for a low one; DoubtfulResult if the options are strict."""
    spec, volume = call.runner.spec, call.volume

    def find_evidence() -> Evidence:
        guess, windows = _look_again(call, plan)
        is_stated = plan.diameter is not None and not plan.estimated
        used = used_width(volume, spec, diameter)
        return Evidence(windows, guess, used, stated=is_stated, steered=plan.steering != Steering())

    with call.stages.measure("decode"):
        judgement = judge_objects(segmentation.objects, spec, find_evidence)
    if judgement.doubt is not None and call.options.strict:
        raise DoubtfulResult(judgement.doubt.detail, suggested=judgement.doubt.suggested)
    return judgement


def _look_again(call: _Call, plan: Plan) -> tuple[Diameter | None, Sequence[Tensor]]:
    """Return how wide objects seem to be, and windows where most is to be seen; neither where that fails.

    Labels that are there already are worth more than advice. Raises Cancelled and DeviceLost.
    """
    spec = call.runner.spec
    image, _notes = normalise_volume(call.volume, spec)
    try:
        guess = None if spec.input.diameter is None else _measure_diameter(call, image, plan).guess
        return guess, strongest_windows(image, spec.input.roi_size)
    except (RuntimeError, MemoryError, OSError, StackSegError) as error:
        if isinstance(error, Cancelled) or call.runner.find_loss(error) is not None:
            raise
        log.warning("%s: why a result is doubtful cannot be told: %s", spec.identifier, error)
        return None, ()


def estimate_diameter(
    runner: ModelRunner,
    volume: Volume,
    options: Options,
    callbacks: Callbacks = ALONE,
    *,
    image: NormalisedImage | None = None,
) -> Sizing | None:
    """Estimate how wide the objects of a volume are; None where `segment` with these options would not.

    `image` is the volume as `normalise_volume` normalises it; None: it is normalised now. Raises what `segment` raises.
    """
    plan, needed = runner.estimator.plan_request(volume, options)
    if not plan.estimated:
        return None
    if options.roi_size is not None:
        runner, options = runner.with_window(options, needed), replace(options, roi_size=None)
        return estimate_diameter(runner, volume, options, callbacks, image=image)
    with runner.computing(needed):
        if image is not None:
            score_windows = runner.score_windows(plan, callbacks.probe)
            return measure_diameter(image, volume, runner.spec, score_windows)
        source, _notes = normalise_volume(volume, runner.spec)
        return _measure_diameter(_Call(runner, volume, options, callbacks, Stages()), source, plan)
