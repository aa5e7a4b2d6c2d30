"""Segmentation of one volume, from normalization to the confidence in the labels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from service.core.errors import Cancelled, LowConfidenceResult, OutOfMemory, StackSegError, TooLarge
from service.core.quantities import Diameter
from service.core.telemetry import Stages
from service.core.types import Options, PostprocessingOptions, Segmentation, Volume
from service.inference.decoding.decoders import Decoder
from service.inference.decoding.postprocessing import apply_postprocessing, compute_min_voxels
from service.inference.diameter.advice import Correction, Evidence, are_flat, find_correction
from service.inference.diameter.confidence import (
    ConfidenceAssessment,
    assess_objects,
    calibrate_objects,
    limit_confidence,
)
from service.inference.diameter.window_selection import select_high_contrast_windows
from service.inference.preprocessing.empty_windows import SkipResult, make_empty_window_filter
from service.inference.preprocessing.normalize import NormalizedImage, normalize_volume
from service.inference.preprocessing.resample import (
    compute_applied_diameter,
    resample_image,
    resample_segmentation,
)
from service.inference.runner.callbacks import Callbacks
from service.inference.types import DiameterEstimate, Plan, PlannedRequest, Result
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances

if TYPE_CHECKING:
    from service.inference.runner.model_runner import ModelRunner
    from service.inference.runner.scoring import ScoringResult

DEFAULT_CALLBACKS = Callbacks()
"""Callbacks for a caller that runs the network in its own thread and needs no progress reports."""

log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """The arguments of one call to `segment`, and the time spent in each of its stages so far."""

    runner: ModelRunner
    volume: Volume
    options: Options
    callbacks: Callbacks
    stages: Stages


class RequestWithDiameter(NamedTuple):
    """A planned request and its object diameter.

    diameter  specified or estimated diameter; None if it is neither
    notes     information for the user about the estimate
    """

    request: PlannedRequest
    diameter: Diameter | None
    notes: tuple[str, ...] = ()


def segment(
    runner: ModelRunner,
    volume: Volume,
    options: Options,
    request: PlannedRequest | None = None,
    callbacks: Callbacks = DEFAULT_CALLBACKS,
) -> Result:
    """Segment one volume [C, Z, Y, X]. The segmentation is on the grid of the volume.

    request  the runner's plan for the volume and the options; None to plan the request now

    Raises BadParameter if the model does not support the options or channels, TooLarge if the request has more windows
    than the operator allows, Cancelled if the callbacks cancel the request between two batches, OutOfMemory if the
    memory is not sufficient, NonFiniteScores if the scores are NaN or infinite even in float32, DeviceLost if the
    device fails, and LowConfidenceResult if the options are strict and the confidence is low.
    """
    request = request or runner.estimator.plan_request(volume, options)
    if (result := _segment_variant(runner, volume, options, request, callbacks)) is not None:
        return result
    call = _Call(runner, volume, options, callbacks, Stages())
    result = _correct_diameter(call, request.plan, _segment_as_planned(call, request))
    if result.quality_warning is not None and options.strict:
        raise LowConfidenceResult(result.quality_warning.detail, suggested=result.quality_warning.suggested_parameters)
    return result


def _segment_as_planned(call: _Call, request: PlannedRequest) -> Result:
    """Segment with the stated diameter, or with the estimate if no diameter is stated."""
    runner, volume, options, callbacks, _stages = call
    with runner.inference_context(request.estimate):
        runner.check_memory(request.estimate)
        with call.stages.measure("prepare"):
            source, normalization_notes = normalize_volume(volume, runner.spec, runner.placement.upload(volume))
        (plan, estimate), diameter, diameter_notes = _apply_diameter(call, source, request)
        image, resampling_notes = _resample(call, source, plan)
        spec = apply_postprocessing(runner.spec, plan.postprocessing, volume, as_size(image.shape[2:]), plan.diameter)
        image, skipped, skipping_notes = _skip_empty_windows(call, image, spec, plan)
        callbacks.progress(0, estimate.windows)
        scoring = _score(call, image, spec, plan)
        # Free the memory of the images before decoding.
        del source, image
        segmentation = _decode(call, scoring.consumer, plan)
        confidence, quality_warning = _assess_confidence(call, segmentation, plan, diameter)
    notes = (*diameter_notes, *resampling_notes, *skipping_notes, *runner.list_batch_notes(options), *scoring.notes)
    return Result(
        segmentation,
        call.stages.seconds,
        (*normalization_notes, *notes, *volume.notes),
        scoring.num_fallbacks,
        scoring.is_recomputed,
        diameter,
        is_diameter_estimated=plan.needs_diameter_estimate and not plan.has_default_diameter and diameter is not None,
        skipped=skipped,
        spec=runner.spec,
        engine=runner.describe_engine(is_recomputed=scoring.is_recomputed),
        confidence=confidence,
        quality_warning=quality_warning,
    )


def _correct_diameter(call: _Call, plan: Plan, result: Result) -> Result:
    """Segment again with a corrected diameter if the stated diameter has one length and does not suit the stack.

    The correction is used if the confidence increases or, for flat objects, decreases by at most `MAX_FLAT_LOSS`. A
    note tells the user.
    """
    runner, volume, options, callbacks, _stages = call
    stated, used = options.diameter, compute_applied_diameter(volume, runner.spec, result.diameter)
    if not isinstance(stated, Diameter) or len(stated.lengths) > 1 or not options.may_correct_diameter or used is None:
        return result
    if (correction := _find_correction(call, plan, result, used)) is None:
        return result
    try:
        request = runner.estimator.plan_request(volume, replace(options, diameter=correction.diameter))
        # The first labels stay in memory until the results have been compared.
        labels_bytes = result.segmentation.pixels.nbytes
        estimate = replace(request.estimate, host_bytes=request.estimate.host_bytes + labels_bytes)
        runner.check_memory(estimate)
        callbacks.on_new_estimate(estimate)
        corrected_result = _segment_as_planned(call, request._replace(estimate=estimate))
    except (TooLarge, OutOfMemory) as error:
        log.info("%s: the stated diameter could not be corrected: %s", runner.spec.identifier, error)
        return result
    confidence, corrected_confidence = (each.confidence or 0.0 for each in (result, corrected_result))
    if corrected_confidence - confidence < correction.min_gain:
        return result
    note = correction.make_note(stated, used, confidence)
    return corrected_result._replace(notes=(note, *corrected_result.notes), is_diameter_estimated=True)


def _find_correction(call: _Call, plan: Plan, result: Result, used_diameter: Sequence[float]) -> Correction | None:
    """Return the correction of a stated diameter, along (z, y, x) in voxels; None if there is none.

    Without a voxel size, objects are assumed to be as deep as wide. This is wrong for flat objects.
    """
    warning, confidence = result.quality_warning, result.confidence
    is_flat = confidence is not None and call.volume.voxel_size is None and are_flat(result.segmentation.pixels)
    return find_correction(warning, confidence, used_diameter, lambda: _inspect_stack(call, plan)[0], is_flat=is_flat)


def _segment_variant(
    runner: ModelRunner, volume: Volume, options: Options, request: PlannedRequest, callbacks: Callbacks
) -> Result | None:
    """Segment with another window, or without planes of zeros, if the request, the volume or the model requires it."""
    if (options := runner.estimator.fit_window(volume, options)).roi_size is not None:
        variant = runner.with_window(options, request.estimate)
        return segment(variant, volume, replace(options, roi_size=None), request, callbacks)._replace(spec=runner.spec)
    if (crop := runner.crop(volume)) is None:
        return None
    result = segment(runner, crop.volume, options, None, callbacks)
    return result._replace(segmentation=crop.undo(result.segmentation, runner.spec, runner.allocate))


def _apply_diameter(call: _Call, image: NormalizedImage, request: PlannedRequest) -> RequestWithDiameter:
    """Estimate the object diameter if the request does not specify it, and then plan the request with the result."""
    if not request.plan.needs_diameter_estimate:
        return RequestWithDiameter(request, request.plan.diameter, request.plan.diameter_notes)
    runner, volume = call.runner, call.volume

    def plan_request(diameter: Diameter) -> PlannedRequest:
        planned_request = runner.estimator.plan_request(volume, replace(call.options, diameter=diameter))
        runner.check_memory(planned_request.estimate)
        return planned_request

    with call.stages.measure("size"):
        diameter_estimate = _get_diameter_estimate(call, image, request.plan)
        request_with_diameter = plan_with_diameter(request, diameter_estimate, plan_request)
    call.callbacks.on_new_estimate(request_with_diameter.request.estimate)
    return request_with_diameter


def _get_diameter_estimate(call: _Call, image: NormalizedImage, plan: Plan) -> DiameterEstimate:
    """Return the estimate of the object diameter, from the cache if the same pixels have been segmented before."""
    runner, default = call.runner, _get_compared_default(call.runner.spec, call.options, plan)
    return runner.diameter_cache.get(image, call.volume, runner.make_window_scorer(plan, call.callbacks.probe), default)


def _get_compared_default(spec: ModelSpec, options: Options, plan: Plan) -> Diameter | None:
    """Return the default diameter with which an estimate is compared, or None."""
    return spec.input.usual_diameter if plan.needs_diameter_estimate and options.diameter is None else None


def _resample(call: _Call, source: NormalizedImage, plan: Plan) -> tuple[Image, tuple[str, ...]]:
    """Return the image on the network's grid, which reads windows into device memory, and notes for the user."""
    with call.stages.measure("prepare"):
        prepared = resample_image(source, call.volume, call.runner.spec, plan.diameter)
        return call.runner.place_image(prepared.image), prepared.notes


def _skip_empty_windows(call: _Call, image: Image, spec: ModelSpec, plan: Plan) -> SkipResult:
    """Skip empty windows if the plan enables skipping. `spec` includes the post-processing options of the request."""
    if plan.skip_below is None:
        return SkipResult(image, None)
    with call.stages.measure("skip"):
        score_windows = call.runner.make_window_scorer(plan, call.callbacks.probe)
        return make_empty_window_filter(image, spec, plan, score_windows).skip(call.volume, plan.skip_below)


def _score(call: _Call, image: Image, spec: ModelSpec, plan: Plan) -> ScoringResult[Decoder]:
    """Compute the scores of all windows, and decode them slab by slab."""
    runner, size = call.runner, as_size(image.shape[2:])
    make_request_decoder = replace(
        runner.make_decoder_factory(call.volume, spec, size, plan.output), cancelled=call.callbacks.cancelled
    )
    compute_slabs = partial(
        runner.choose_inferer(call.callbacks.run),
        cancelled=call.callbacks.cancelled,
        progress=lambda done, total: call.callbacks.progress(done * plan.num_views, total * plan.num_views),
    )
    return runner.score_computer.compute_scores(
        image, plan, runner.placement.choose_decoder_factory(make_request_decoder, plan), call.stages, compute_slabs
    )


def _decode(call: _Call, decoder: Decoder, plan: Plan) -> Segmentation:
    """Return the segmentation on the grid of the volume. The decoder must have received all scores."""
    with call.stages.measure("decode"):
        min_voxels = compute_min_voxels(plan.postprocessing, call.volume)
        segmentation = resample_segmentation(decoder.finish(), call.volume.shape[1:], min_voxels)
        if segmentation.objects is None:
            return segmentation
        objects = calibrate_objects(segmentation.objects, call.runner.spec)
        return replace(segmentation, objects=limit_confidence(objects, segmentation.pixels))


def _assess_confidence(
    call: _Call, segmentation: Segmentation, plan: Plan, diameter: Diameter | None
) -> ConfidenceAssessment:
    """Return the confidence in the labels, and a warning if it is low."""
    spec, volume = call.runner.spec, call.volume

    def collect_evidence() -> Evidence:
        likely_diameter, windows = _inspect_stack(call, plan)
        is_diameter_given = plan.diameter is not None and not (
            plan.needs_diameter_estimate or plan.has_default_diameter
        )
        applied_diameter = compute_applied_diameter(volume, spec, diameter)
        return Evidence(
            windows,
            likely_diameter,
            applied_diameter,
            is_diameter_given=is_diameter_given,
            has_postprocessing=plan.postprocessing != PostprocessingOptions(),
        )

    with call.stages.measure("decode"):
        return assess_objects(segmentation.objects, spec, collect_evidence)


def _inspect_stack(call: _Call, plan: Plan) -> tuple[Diameter | None, Sequence[Tensor]]:
    """Return the likely object diameter and some high-contrast windows, as evidence for a warning.

    Errors other than Cancelled and DeviceLost are logged instead of raised, because the labels must not be lost. After
    such an error, no evidence is returned.
    """
    spec = call.runner.spec
    image, _notes = normalize_volume(call.volume, spec)
    can_estimate = spec.input.diameter is not None and isinstance(spec.decoding, Instances)
    try:
        likely_diameter = _get_diameter_estimate(call, image, plan).likely_diameter if can_estimate else None
        return likely_diameter, select_high_contrast_windows(image, spec.input.roi_size)
    except (RuntimeError, MemoryError, OSError, StackSegError) as error:
        if isinstance(error, Cancelled) or call.runner.find_device_loss(error) is not None:
            raise
        log.warning("%s: could not collect evidence for the low-confidence warning: %s", spec.identifier, error)
        return None, ()


def estimate_diameter(
    runner: ModelRunner,
    volume: Volume,
    options: Options,
    callbacks: Callbacks = DEFAULT_CALLBACKS,
    *,
    image: NormalizedImage | None = None,
) -> DiameterEstimate | None:
    """Estimate the object diameter of a volume. Returns None if `segment` would not estimate it with these options.

    `image` is the result of `normalize_volume`; None to normalize the volume now. Raises the same errors as `segment`.
    """
    plan, estimate = runner.estimator.plan_request(volume, options)
    if not plan.needs_diameter_estimate:
        return None
    if options.roi_size is not None:
        runner, options = runner.with_window(options, estimate), replace(options, roi_size=None)
        return estimate_diameter(runner, volume, options, callbacks, image=image)
    with runner.inference_context(estimate):
        if image is not None:
            score_windows = runner.make_window_scorer(plan, callbacks.probe)
            default = _get_compared_default(runner.spec, options, plan)
            return runner.diameter_cache.measure(image, volume, score_windows, default)
        source, _notes = normalize_volume(volume, runner.spec)
        return _get_diameter_estimate(_Call(runner, volume, options, callbacks, Stages()), source, plan)


def plan_with_diameter(
    request: PlannedRequest, diameter_estimate: DiameterEstimate, plan_request: Callable[[Diameter], PlannedRequest]
) -> RequestWithDiameter:
    """Plan a request again with the estimated diameter if resampling improves the result.

    If `plan_request` raises TooLarge or OutOfMemory, the stack is segmented at the default diameter of the model or, if
    there is none, at its original resolution.
    """
    diameter, default = diameter_estimate.resampling_diameter, request.plan.diameter
    if diameter is None or diameter == default:
        return RequestWithDiameter(request, diameter_estimate.diameter, (diameter_estimate.note,))
    try:
        new_plan, estimate = plan_request(diameter)
    except (TooLarge, OutOfMemory) as error:
        finding = f"The objects seem to be {diameter.describe()}"
        alternative = "at its original resolution" if default is None else f"with diameter={default}"
        note = f"{finding}, but the stack is segmented {alternative}. {error}"
        return RequestWithDiameter(request, default or diameter, (note,))
    plan = request.plan._replace(diameter=diameter, has_default_diameter=False, decode_on_host=new_plan.decode_on_host)
    return RequestWithDiameter(PlannedRequest(plan, estimate), diameter, (diameter_estimate.note,))
