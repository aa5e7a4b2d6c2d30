"""Planning of requests before anything is computed: options, windows and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from service.core.config import Settings
from service.core.errors import BadParameter, TooLarge
from service.core.quantities import Diameter, DiameterSetting, Size, SkipBelow
from service.core.sections.serving import Limits
from service.core.types import Description, Extent, Options, OutputKind, Volume
from service.formats.axes import format_channels
from service.inference.decoding.postprocessing import check_postprocessing, compute_min_voxels
from service.inference.preprocessing.resample import compute_working_size
from service.inference.runner.memory_estimate import WindowMemory, estimate_activation_bytes, estimate_request
from service.inference.types import Plan, PlannedRequest, ResourceEstimate
from service.inference.windows.grid import fit_window_length, round_up
from service.inference.windows.views import count_view_bytes, get_best_quality_views
from service.models.spec import ModelSpec
from service.models.spec_parts import Flows, Instances, StarConvex

# Maximum fraction of a device's memory that one request may need. If a request needs more, its scores are decoded on
# the host. The rest is for models, other requests and the allocator.
MAX_DEVICE_MEMORY_FRACTION = 0.5

# Overlap of windows with quality=best, unless the request specifies it or the operator's limit is lower.
BEST_QUALITY_OVERLAP = 0.5

# Overlap of the tiles of planes, as in Cellpose.
PLANE_OVERLAP = 0.1

# Number of windows per call if the operator has not configured it and the model has not been tuned.
UNTUNED_BATCH_SIZE = 2


def make_plan(
    spec: ModelSpec, settings: Settings, options: Options, tuned_batch_size: int = UNTUNED_BATCH_SIZE
) -> Plan:
    """Apply the operator's defaults and limits. `tuned_batch_size` is used if the operator has not configured one.

    Raises BadParameter for options that exceed the operator's limits, for outputs that the model does not support, for
    a diameter that the model cannot estimate, and for post-processing options that do not apply to the output.
    """
    default_batch_size = settings.windows.sw_batch_size
    if default_batch_size == "auto":
        default_batch_size = tuned_batch_size
    batch_size = default_batch_size if options.sw_batch_size is None else options.sw_batch_size
    overlap = _choose_overlap(spec, settings, options)
    _check_limits(settings.limits, batch_size, overlap)
    skip_below = _choose_skipping(spec, settings, options)
    output = _choose_output(spec, options.output)
    check_postprocessing(spec, output, options.postprocessing)
    diameter = spec.input.usual_diameter if options.diameter is None else options.diameter
    return Plan(
        output=output,
        sw_batch_size=batch_size,
        overlap=overlap,
        diameter=None if isinstance(diameter, str) else diameter,
        needs_diameter_estimate=_needs_diameter_estimate(spec, options),
        has_default_diameter=options.diameter is None and diameter is not None,
        skip_below=None if skip_below == "none" else skip_below,
        postprocessing=options.postprocessing,
        views=get_best_quality_views(spec.input.mirror_axes) if options.quality == "best" else (),
    )


def _choose_skipping(spec: ModelSpec, settings: Settings, options: Options) -> SkipBelow:
    """Return the intensity below which windows are skipped. Raises BadParameter if this is not supported."""
    if isinstance(spec.decoding, StarConvex | Flows):
        prediction = "flows" if isinstance(spec.decoding, Flows) else "distances of star-convex polyhedra"
        _check_directions(spec, settings, options, prediction)
        return "none"
    skip_below = settings.windows.skip_below if options.skip_below is None else options.skip_below
    if settings.windows.inferer == "monai" and skip_below != "none":
        raise BadParameter(
            "This service uses MONAI's inferer, which cannot skip windows. Omit skip_below=.",
            parameter="skip_below",
        )
    return skip_below


def _check_directions(spec: ModelSpec, settings: Settings, options: Options, prediction: str) -> None:
    """Raise BadParameter for options that a model that predicts polyhedra or flows does not support."""
    if settings.windows.inferer == "monai":
        raise BadParameter(
            f"This service uses MONAI's inferer, which does not support {spec.name}, because the model predicts "
            f"{prediction}. Use a different model."
        )
    if options.quality == "best":
        raise BadParameter(
            f"quality: {spec.name} predicts {prediction} along fixed directions, which cannot be averaged over mirrored"
            " views. Use quality=fast.",
            parameter="quality",
            suggested={"quality": "fast"},
        )
    if options.skip_below not in (None, "none"):
        raise BadParameter(
            f"skip_below: empty windows cannot be skipped with {spec.name}, because the model predicts {prediction}."
            " Omit skip_below=.",
            parameter="skip_below",
        )


def _choose_overlap(spec: ModelSpec, settings: Settings, options: Options) -> float:
    if isinstance(spec.decoding, Flows):
        if options.overlap not in (None, PLANE_OVERLAP):
            raise BadParameter(
                f"overlap: the tiles of {spec.name} always overlap by {PLANE_OVERLAP:.0%}. Omit overlap=.",
                parameter="overlap",
            )
        return PLANE_OVERLAP
    default_overlap = settings.windows.overlap
    if options.quality == "best":
        default_overlap = max(default_overlap, min(BEST_QUALITY_OVERLAP, settings.limits.overlap))
    return default_overlap if options.overlap is None else options.overlap


def _check_limits(limits: Limits, batch_size: int, overlap: float) -> None:
    if not 1 <= batch_size <= limits.sw_batch_size:
        raise BadParameter(
            f"sw_batch_size must be between 1 and {limits.sw_batch_size}, not {batch_size}.", parameter="sw_batch_size"
        )
    if not 0 <= overlap <= limits.overlap:
        raise BadParameter(f"overlap must be between 0 and {limits.overlap}, not {overlap}.", parameter="overlap")


def replace_window_size(spec: ModelSpec, roi_size: Size | None) -> ModelSpec:
    """Return the spec with the requested window size. Raises BadParameter if the model does not support this size."""
    default_size, multiples = spec.input.roi_size, spec.input.roi_multiple
    if roi_size is None or roi_size == default_size:
        return spec
    if multiples is None:
        raise BadParameter(
            f"The model {spec.name} supports only the window size {_format_size(default_size)}. Omit roi_size=.",
            parameter="roi_size",
        )
    if any(length % multiple for length, multiple in zip(roi_size, multiples, strict=True)):
        raise BadParameter(
            f"The window size (roi_size) of {spec.name} must be a multiple of {_format_size(multiples)}, not"
            f" {_format_size(roi_size)}.",
            parameter="roi_size",
        )
    return spec.model_copy(update={"input": spec.input.model_copy(update={"roi_size": roi_size})})


def compute_window_scale(spec: ModelSpec, other_spec: ModelSpec) -> float:
    """Return the ratio of the number of voxels in the window of `other_spec` to the number in the window of `spec`."""
    return math.prod(other_spec.input.roi_size) / math.prod(spec.input.roi_size)


def _format_size(size: Size) -> str:
    return ",".join(map(str, size))


def _choose_output(spec: ModelSpec, requested_output: OutputKind | None) -> OutputKind:
    if requested_output == "labels" and not spec.has_objects:
        raise BadParameter(
            f"{spec.name} predicts classes, not objects. Use output=classes or output=probabilities.",
            parameter="output",
            suggested={"output": "classes"},
        )
    return requested_output or ("labels" if spec.has_objects else "classes")


def _needs_diameter_estimate(spec: ModelSpec, options: Options) -> bool:
    """Return whether the object diameter has to be estimated from the stack."""
    if options.diameter == "auto" and (spec.input.diameter is None or not isinstance(spec.decoding, Instances)):
        raise BadParameter(
            f"The model {spec.name} has no object diameter that can be estimated. Omit diameter=.", parameter="diameter"
        )
    if options.diameter is not None or not spec.input.estimate_diameter:
        return options.diameter == "auto"
    # An estimate replaces the default diameter only if it has a higher confidence.
    return spec.input.usual_diameter is None or spec.confidence is not None


@dataclass(frozen=True)
class Estimator:
    """Plans requests for one model, both before and after the model is loaded.

    sw_batch_size            number of windows per call if the operator has not configured it
    window_bytes             bytes of activations for one window; None: use the estimate for a typical network
    score_bytes              bytes of memory per window in batches of exactly `sw_batch_size` windows; None: same as
                             `window_bytes`
    accepts_partial_batches  whether the network, which was built for `sw_batch_size` windows, also accepts fewer; None:
                             the network runs eagerly with any number of windows, and batches of fewer than
                             `sw_batch_size` windows run in a single stream
    uses_host_memory         whether the device uses the host's memory
    streams                  number of concurrent batches of `sw_batch_size` windows
    device_memory_bytes      size of the device's own memory in bytes; None: unknown, or the device uses host memory
    """

    spec: ModelSpec
    settings: Settings
    sw_batch_size: int = UNTUNED_BATCH_SIZE
    window_bytes: int | None = None
    uses_host_memory: bool = True
    streams: int = 1
    score_bytes: int | None = None
    accepts_partial_batches: bool | None = None
    device_memory_bytes: int | None = None

    def fit_batch_size(self, batch_size: int) -> int:
        """Return the number of windows per call for a requested batch size, depending on how the network was built."""
        if self.accepts_partial_batches is None:
            return batch_size
        return min(batch_size, self.sw_batch_size) if self.accepts_partial_batches else self.sw_batch_size

    def with_window_size(self, options: Options) -> Estimator:
        """Return the estimator for the requested window size. Raises BadParameter like `replace_window_size`."""
        spec = replace_window_size(self.spec, options.roi_size)
        if spec is self.spec:
            return self
        scale = compute_window_scale(self.spec, spec)
        return replace(
            self,
            spec=spec,
            sw_batch_size=options.sw_batch_size or self.sw_batch_size,
            window_bytes=None if self.window_bytes is None else int(self.window_bytes * scale),
            score_bytes=None if self.score_bytes is None else int(self.score_bytes * scale),
        )

    def fit_window(self, volume: Extent, options: Options) -> Options:
        """Return options with a window that suits the size of the volume, if the model predicts star-convex polyhedra.

        The window is not larger than the volume. Like StarDist, the network then sees the faces of the volume instead
        of padding, which would change the objects there. If the volume is only slightly larger than the window, a
        smaller window is used, so that the parts of two windows near their edges do not coincide.

        Raises the same errors as `compute_working_size`.
        """
        if self.spec.tiling.name != "stardist":
            return options
        alignment = self.spec.tiling.alignment
        diameter = options.diameter if isinstance(options.diameter, Diameter) else None
        size = round_up(compute_working_size(volume, self.spec, diameter), alignment)
        overlap, roi_size = (
            _choose_overlap(self.spec, self.settings, options),
            options.roi_size or self.spec.input.roi_size,
        )
        z, y, x = (
            fit_window_length(length, window_length, overlap, multiple)
            for length, window_length, multiple in zip(size, roi_size, alignment, strict=True)
        )
        return options if (z, y, x) == roi_size else replace(options, roi_size=(z, y, x))

    def plan(self, options: Options) -> Plan:
        """Plan a request without a volume. Raises the same errors as `make_plan` and `replace_window_size`."""
        if options.roi_size is not None:
            return self.with_window_size(options).plan(replace(options, roi_size=None))
        plan = make_plan(self.spec, self.settings, options, self.sw_batch_size)
        return plan._replace(sw_batch_size=self.fit_batch_size(plan.sw_batch_size))

    def get_output_kind(self, options: Options) -> OutputKind:
        """Return the kind of the result. Raises BadParameter for invalid options."""
        return self.plan(options).output

    def get_diameter_setting(self, options: Options) -> DiameterSetting:
        """Return the object diameter, "auto" or "none". Raises BadParameter for invalid options."""
        plan = self.plan(options)
        return plan.diameter or ("auto" if plan.needs_diameter_estimate else "none")

    def estimate(self, volume: Extent, options: Options) -> ResourceEstimate:
        """Return the estimate without the plan. Raises the same errors as `plan_request`."""
        return self.plan_request(volume, options).estimate

    def plan_request(self, volume: Extent, options: Options) -> PlannedRequest:
        """Plan the segmentation of a volume of this shape and voxel size.

        Raises BadParameter for invalid options or channels, and TooLarge for more windows than the limit allows.
        """
        options = self.fit_window(volume, options)
        if options.roi_size is not None:
            return self.with_window_size(options).plan_request(volume, replace(options, roi_size=None))
        plan = self.plan(options)
        self._check_channels(volume)
        if isinstance(self.spec.decoding, Flows) and volume.shape[1] == 1:
            raise BadParameter(f"{self.spec.name} segments stacks of at least two planes, but the image has only one.")
        compute_min_voxels(plan.postprocessing, volume)
        window_memory = self._get_window_memory(plan)
        request_estimate = estimate_request(self.spec, volume, plan, window_memory)
        if (
            self.device_memory_bytes is not None
            and request_estimate.device_bytes > MAX_DEVICE_MEMORY_FRACTION * self.device_memory_bytes
        ):
            plan = plan._replace(decode_on_host=True)
            request_estimate = estimate_request(self.spec, volume, plan, window_memory)
        if self.settings.windows.inferer == "monai":
            request_estimate = self._add_monai_bytes(request_estimate)
        if request_estimate.windows > (max_windows := self.settings.limits.windows):
            raise TooLarge(
                f"The volume needs {request_estimate.windows} windows, but this service allows at most"
                f" {max_windows} for one volume. Crop the volume, or use less overlap"
                f"{', quality=fast' * bool(plan.views)} or a larger diameter.",
                suggested={"quality": "fast"} if plan.views else None,
            )
        return PlannedRequest(plan, request_estimate)

    def _get_window_memory(self, plan: Plan) -> WindowMemory:
        """Return the memory that running the network on the windows of a plan needs."""
        window_bytes, streams = self.window_bytes, self.streams
        if window_bytes is None:
            window_bytes = estimate_activation_bytes((1, self.spec.input.channels, *self.spec.input.roi_size))
        if plan.sw_batch_size < self.sw_batch_size and self.accepts_partial_batches is None:
            streams = 1
        elif plan.sw_batch_size == self.sw_batch_size and self.score_bytes is not None:
            window_bytes = self.score_bytes
        if plan.views:
            voxels = math.prod(self.spec.input.roi_size)
            window_bytes += count_view_bytes(self.spec.input.channels, len(self.spec.outputs), voxels)
        return WindowMemory(window_bytes, streams, self.uses_host_memory)

    def _add_monai_bytes(self, request_estimate: ResourceEstimate) -> ResourceEstimate:
        """Add the size of the float32 arrays that MONAI holds in addition to the windows: image, scores and weights."""
        voxel_bytes = 4 * math.prod(request_estimate.working_size)
        image_bytes, score_volume_bytes = (
            voxel_bytes * self.spec.input.channels,
            voxel_bytes * (len(self.spec.outputs) + 1),
        )
        host_total, device_total = (
            request_estimate.host_bytes + image_bytes,
            request_estimate.device_bytes + (0 if self.uses_host_memory else image_bytes),
        )
        if self.uses_host_memory or self.settings.windows.device == "cpu":
            return replace(request_estimate, host_bytes=host_total + score_volume_bytes, device_bytes=device_total)
        return replace(request_estimate, host_bytes=host_total, device_bytes=device_total + score_volume_bytes)

    def _check_channels(self, volume: Extent) -> None:
        count, expected_count = volume.shape[0], self.spec.input.channels
        if count == expected_count:
            return
        channel_names = volume.channels if isinstance(volume, Volume | Description) else ()
        if len(channel_names) != count:
            channel_names = ("",) * count
        channels = f"{expected_count} channel" + ("s" if expected_count > 1 else "")
        raise BadParameter(
            f"{self.spec.name} needs {channels}, but the volume has {format_channels(channel_names)}. Use"
            " channel= with an index or a name.",
            parameter="channel",
        )
