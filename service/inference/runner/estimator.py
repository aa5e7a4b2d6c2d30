"""Planning of requests before anything is computed: options, windows and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from service.core.config import Settings
from service.core.errors import BadParameter, TooLarge
from service.core.quantities import DiameterSetting, Size
from service.core.sections.serving import Limits
from service.core.types import Description, Extent, Options, OutputKind, Volume
from service.inference.decoding.postprocessing import check_postprocessing, minimum_voxels
from service.inference.runner.memory_estimate import WindowLoad, estimate, typical_activation_bytes
from service.inference.types import Estimate, Plan, PlannedRequest
from service.inference.windows.views import BEST_QUALITY_VIEWS, views_bytes
from service.models.spec import Instances, ModelSpec

# Fraction of a device's memory that one request may need before its scores are decoded on the host. The rest is for
# models, other requests and the allocator.
MAX_DEVICE_MEMORY_FRACTION = 0.5

# Overlap of windows with quality=best, unless the request specifies it or the operator's limit is lower.
BEST_OVERLAP = 0.5


# Windows per call if the operator does not configure it and nothing was tuned.
UNTUNED_BATCH = 2


def make_plan(spec: ModelSpec, settings: Settings, options: Options, tuned: int = UNTUNED_BATCH) -> Plan:
    """Apply the operator's defaults and limits. `tuned` is the batch size if the operator does not configure one.

    Raises BadParameter for options beyond the operator's limits, for outputs that the model does not have, for a
    diameter that it cannot estimate, and for post-processing options that do not apply to the output.
    """
    windows = settings.windows
    configured = tuned if windows.sw_batch_size == "auto" else windows.sw_batch_size
    batch_size = configured if options.sw_batch_size is None else options.sw_batch_size
    overlap = _choose_overlap(settings, options)
    _check_limits(settings.limits, batch_size, overlap)
    below = windows.skip_below if options.skip_below is None else options.skip_below
    if windows.inferer == "monai" and below != "none":
        raise BadParameter(
            "skip_below: this service uses the inferer of MONAI, which cannot skip windows. Omit this parameter.",
            parameter="skip_below",
        )
    output = _choose_output(spec, options.output)
    check_postprocessing(spec, output, options.postprocessing)
    return Plan(
        output=output,
        sw_batch_size=batch_size,
        overlap=overlap,
        diameter=None if isinstance(options.diameter, str) else options.diameter,
        needs_diameter_estimate=_needs_diameter(spec, options),
        skip_below=None if below == "none" else below,
        postprocessing=options.postprocessing,
        views=BEST_QUALITY_VIEWS if options.quality == "best" else (),
    )


def _choose_overlap(settings: Settings, options: Options) -> float:
    default = settings.windows.overlap
    if options.quality == "best":
        default = max(default, min(BEST_OVERLAP, settings.limits.overlap))
    return default if options.overlap is None else options.overlap


def _check_limits(limits: Limits, batch_size: int, overlap: float) -> None:
    if not 1 <= batch_size <= limits.sw_batch_size:
        raise BadParameter(
            f"sw_batch_size must be between 1 and {limits.sw_batch_size}, not {batch_size}.", parameter="sw_batch_size"
        )
    if not 0 <= overlap <= limits.overlap:
        raise BadParameter(f"overlap must be between 0 and {limits.overlap}, not {overlap}.", parameter="overlap")


def choose_window(spec: ModelSpec, roi_size: Size | None) -> ModelSpec:
    """Return the model with the requested window size. Raises BadParameter if the model does not support it."""
    fixed, steps = spec.input.roi_size, spec.input.roi_multiple
    if roi_size is None or roi_size == fixed:
        return spec
    if steps is None:
        raise BadParameter(
            f"roi_size: {spec.name} supports only windows of {_edges(fixed)}. Omit this parameter.",
            parameter="roi_size",
        )
    if any(edge % step for edge, step in zip(roi_size, steps, strict=True)):
        raise BadParameter(
            f"roi_size: {spec.name} supports multiples of {_edges(steps)}, not {_edges(roi_size)}.",
            parameter="roi_size",
        )
    return spec.model_copy(update={"input": spec.input.model_copy(update={"roi_size": roi_size})})


def window_scale(spec: ModelSpec, other: ModelSpec) -> float:
    """Return the ratio of the number of voxels in the window of `other` to that in the window of `spec`."""
    return math.prod(other.input.roi_size) / math.prod(spec.input.roi_size)


def _edges(size: Size) -> str:
    return ",".join(map(str, size))


def _choose_output(spec: ModelSpec, wanted: OutputKind | None) -> OutputKind:
    instances = spec.decoding.kind == "instances"
    if wanted == "labels" and not instances:
        raise BadParameter(
            f"{spec.name} predicts classes, not objects. Use output=classes or output=probabilities.",
            parameter="output",
            suggested={"output": "classes"},
        )
    return wanted or ("labels" if instances else "classes")


def _needs_diameter(spec: ModelSpec, options: Options) -> bool:
    """Return whether the object diameter has to be estimated from the stack."""
    if options.diameter == "auto" and (spec.input.diameter is None or not isinstance(spec.decoding, Instances)):
        raise BadParameter(f"The model {spec.name} has no object diameter. Omit diameter=.", parameter="diameter")
    return options.diameter == "auto" or (options.diameter is None and spec.input.estimate_diameter)


@dataclass(frozen=True)
class Estimator:
    """Plans requests to one model, both before and after it is loaded.

    sw_batch_size           windows per call if the operator does not configure it
    window_bytes            bytes of activations for one window; None: those of a typical network
    score_bytes             bytes per window in full batches of `sw_batch_size`; None: `window_bytes`
    accepts_any_batch_size  whether the network, built for `sw_batch_size` windows, also accepts fewer; None: it runs
                            eagerly with any number, in a single stream if there are fewer
    on_host                 whether the device uses the host's memory
    streams                 number of concurrent batches of `sw_batch_size` windows
    device_memory           bytes of the device's own memory; None: unknown, or the host's memory
    """

    spec: ModelSpec
    settings: Settings
    sw_batch_size: int = UNTUNED_BATCH
    window_bytes: int | None = None
    on_host: bool = True
    streams: int = 1
    score_bytes: int | None = None
    accepts_any_batch_size: bool | None = None
    device_memory: int | None = None

    def fit_batch(self, batch_size: int) -> int:
        """Return the windows per call for a request of `batch_size`, given how the network was built."""
        if self.accepts_any_batch_size is None:
            return batch_size
        return min(batch_size, self.sw_batch_size) if self.accepts_any_batch_size else self.sw_batch_size

    def for_window(self, options: Options) -> Estimator:
        """Return the estimator for the requested window size. Raises BadParameter like `choose_window`."""
        spec = choose_window(self.spec, options.roi_size)
        if spec is self.spec:
            return self
        scale = window_scale(self.spec, spec)
        return replace(
            self,
            spec=spec,
            sw_batch_size=options.sw_batch_size or self.sw_batch_size,
            window_bytes=None if self.window_bytes is None else int(self.window_bytes * scale),
            score_bytes=None if self.score_bytes is None else int(self.score_bytes * scale),
        )

    def plan(self, options: Options) -> Plan:
        """Plan without a volume. Raises the errors of `make_plan` and `choose_window`."""
        if options.roi_size is not None:
            return self.for_window(options).plan(replace(options, roi_size=None))
        plan = make_plan(self.spec, self.settings, options, self.sw_batch_size)
        return plan._replace(sw_batch_size=self.fit_batch(plan.sw_batch_size))

    def output_kind(self, options: Options) -> OutputKind:
        """Return the kind of the result. Raises BadParameter for invalid options."""
        return self.plan(options).output

    def diameter_setting(self, options: Options) -> DiameterSetting:
        """Return how the object diameter is determined. Raises BadParameter for invalid options."""
        plan = self.plan(options)
        return "auto" if plan.needs_diameter_estimate else plan.diameter or "none"

    def estimate(self, volume: Extent, options: Options) -> Estimate:
        """Return the estimate without the plan. Raises the errors of `plan_request`."""
        return self.plan_request(volume, options).estimate

    def plan_request(self, volume: Extent, options: Options) -> PlannedRequest:
        """Plan the segmentation of a volume of this shape and voxel size.

        Raises BadParameter for invalid options or channels, and TooLarge for more windows than the limit.
        """
        if options.roi_size is not None:
            return self.for_window(options).plan_request(volume, replace(options, roi_size=None))
        plan = self.plan(options)
        self._check_channels(volume)
        minimum_voxels(plan.postprocessing, volume)
        window_load = self._load(plan)
        needed = estimate(self.spec, volume, plan, window_load)
        if self.device_memory is not None and needed.device_bytes > MAX_DEVICE_MEMORY_FRACTION * self.device_memory:
            plan = plan._replace(decode_on_host=True)
            needed = estimate(self.spec, volume, plan, window_load)
        if self.settings.windows.inferer == "monai":
            needed = self._add_whole_scores(needed)
        if needed.windows > (most := self.settings.limits.windows):
            raise TooLarge(
                f"The volume needs {needed.windows} windows, and this service computes up to {most} for one volume."
                f" Crop it, or use less overlap{', quality=fast' * bool(plan.views)} or a larger diameter.",
                suggested={"quality": "fast"} if plan.views else None,
            )
        return PlannedRequest(plan, needed)

    def _load(self, plan: Plan) -> WindowLoad:
        """Return the load of computing the windows of a plan."""
        window_bytes, streams = self.window_bytes, self.streams
        if window_bytes is None:
            window_bytes = typical_activation_bytes((1, self.spec.input.channels, *self.spec.input.roi_size))
        if plan.sw_batch_size < self.sw_batch_size and self.accepts_any_batch_size is None:
            streams = 1
        elif plan.sw_batch_size == self.sw_batch_size and self.score_bytes is not None:
            window_bytes = self.score_bytes
        if plan.views:
            voxels = math.prod(self.spec.input.roi_size)
            window_bytes += views_bytes(self.spec.input.channels, len(self.spec.outputs), voxels)
        return WindowLoad(window_bytes, streams, self.on_host)

    def _add_whole_scores(self, needed: Estimate) -> Estimate:
        """Add the float32 arrays that MONAI holds in addition to the windows: image, scores and weights."""
        voxels = 4 * math.prod(needed.working_size)
        image, scores = voxels * self.spec.input.channels, voxels * (len(self.spec.outputs) + 1)
        host, device = needed.host_bytes + image, needed.device_bytes + (0 if self.on_host else image)
        if self.on_host or self.settings.windows.device == "cpu":
            return replace(needed, host_bytes=host + scores, device_bytes=device)
        return replace(needed, host_bytes=host, device_bytes=device + scores)

    def _check_channels(self, volume: Extent) -> None:
        count, expected = volume.shape[0], self.spec.input.channels
        if count == expected:
            return
        names = volume.channels if isinstance(volume, Volume | Description) else ()
        if len(names) != count:
            names = ("",) * count
        named = ", ".join(f"{index}{f' ({name})' if name else ''}" for index, name in enumerate(names))
        channels = f"{expected} channel" + ("s" if expected > 1 else "")
        raise BadParameter(
            f"{self.spec.name} needs {channels}, but the volume has {count}: {named}. Use channel= (index or name).",
            parameter="channel",
        )
