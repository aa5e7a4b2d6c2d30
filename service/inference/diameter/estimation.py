"""Estimate the object diameter of a stack from a few windows at several scales.

A network finds objects best at the diameter that it was trained on. At other diameters, it merges or splits objects, or
predicts lower peaks of the distance. The best scale is therefore the one at which the objects have the expected
diameter and high peaks. The objects found at one scale suggest the next scale to probe. Cellpose (Stringer et al. 2021)
uses a separate model for a first estimate, and refines it with a first segmentation. If the confidence at the estimated
diameter is low, or if no scale fits well, a trial selects the scale with the highest confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.core.quantities import Diameter, Size, VoxelSize
from service.core.types import Objects
from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.postprocessing import require_instances
from service.inference.diameter.advice import MIN_FLAT_ASPECT
from service.inference.diameter.confidence import predict_confidence
from service.inference.diameter.scale_probe import (
    EQUAL_SCALE_RATIO,
    MATCHING_DIAMETER_RATIO,
    MAX_ROUND_ASPECT,
    MAX_SCALE_RATIO,
    MIN_FIT_FOR_SUGGESTION,
    Factors,
    ScaleProbe,
    are_close,
    choose_better_probe,
    compute_expected_flatness,
    compute_max_factors,
    is_probed,
    measure_extents,
    measure_flatness,
    suggest_flat_factors,
)
from service.inference.diameter.window_selection import (
    Box,
    cut_boxes,
    make_box_around,
    rank_by_contrast,
    select_spaced_boxes,
)
from service.inference.types import DiameterEstimate, DiameterTrial
from service.inference.windows.grid import Grid, as_size
from service.inference.windows.sliding_window import Image, ScoreWindows
from service.inference.windows.slots import fill_with_mirror_images
from service.models.spec import ModelSpec

# Scales and numbers of windows of the initial probes. At a small scale, a window shows more of the stack.
INITIAL_PROBES = ((1.0, 4), (2.0, 4), (0.4, 2))
# Maximum number of further probes, and the number of windows of each probe.
MAX_FURTHER_PROBES = 3
WINDOWS_PER_PROBE = 4
# Minimum number of objects for a median diameter, unless the windows show at least FULL_COVERAGE_FRACTION of the stack.
MIN_OBJECTS = 5
FULL_COVERAGE_FRACTION = 0.9
# Standard deviations of the logarithms of diameter, aspect ratio and scale, used to compute the fit.
SIZE_SIGMA = 0.5
ASPECT_SIGMA = 1.0
SCALE_SIGMA = 2.5
# Fit below which the diameter is not used, because the objects do not look like the model's training data.
MIN_FIT = 0.5
# Minimum fit at which further probes and a trial are unnecessary.
GOOD_FIT = 0.65
# Scales of a trial, with the number of windows of each scale. A trial runs if the confidence at the estimated diameter
# is low or no scale fits well. A trial selects a larger scale than these only if the objects found there suggest it.
TRIAL_SCALES = ((0.2, 2), (1.0, 4), (2.8, 4))
# Minimum gain in log-odds of a trial over the reference scale, checked by `python -m scripts.recipes.trials`.
MIN_LOG_ODDS_GAIN = 1.0


class DiameterEstimator:
    """Estimator of the diameter of the objects in one image, for an instance model with an object diameter.

    image          normalized image, at the original resolution of its volume
    base           voxels of the model's grid per voxel of the image along (z, y, x), if no diameter is specified
    score_windows  computes the scores of a few windows, which are padded beyond the ends of the image
    voxel_size     voxel size of the image; None if it is not known
    margin         minimum difference in log-odds between a scale of a trial and the reference scale
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        image: Image,
        base: Factors,
        spec: ModelSpec,
        score_windows: ScoreWindows,
        voxel_size: VoxelSize | None = None,
        margin: float = MIN_LOG_ODDS_GAIN,
    ) -> None:
        if spec.input.diameter is None:
            raise ValueError(f"The model {spec.name} has no object diameter.")
        self._image, self._base, self._spec, self._score_windows = image, base, spec, score_windows
        self._voxel_size, self._margin = voxel_size, margin
        self._flatness = compute_expected_flatness(voxel_size, base)
        # Keep fragments, because they indicate that a scale does not fit.
        filters = ("minimum_fraction", "min_confidence", "min_relative_odds")
        self._decoding = require_instances(spec).model_copy(update=dict.fromkeys(filters, 0.0))
        self._expected_diameter = spec.input.diameter
        self._size = as_size(image.shape[2:])

    def estimate(self, centers: Sequence[Size] = ()) -> DiameterEstimate:
        """Estimate the diameter around `centers` (default: `rank_by_contrast`). Raises as `score_windows`."""
        centers = centers or rank_by_contrast(self._image, self._spec.input.roi_size)
        probes = self._probe_scales(centers)
        estimate, reference = self._estimate_from_probes(probes)
        calibration = self._spec.confidence
        if calibration is None or reference.confidence is None:
            return estimate
        # Pieces of objects that are too large for the windows have a plausible size and peak, but rarely a good fit.
        if reference.confidence < calibration.threshold or max(probe.fit for probe in probes) < GOOD_FIT:
            return self._run_trial(estimate, reference, probes, centers)
        return estimate

    def _probe_scales(self, centers: Sequence[Size]) -> list[ScaleProbe]:
        """Probe the initial scales, then suggested scales, until another probe is unlikely to improve the estimate."""
        probes = list[ScaleProbe]()
        for scale, num_windows in INITIAL_PROBES:
            probes.append(self.probe(centers, self._scale_base(scale, self._flatness), num_windows))
            if self._is_settled(probes) or (len(probes) == 1 and self._probe_flat_objects(probes, centers)):
                return probes
        for _ in range(MAX_FURTHER_PROBES):
            factors = self._suggest_factors(probes)
            if factors is None or self._is_settled(probes):
                break
            probes.append(self.probe(centers, factors, WINDOWS_PER_PROBE))
        return probes

    def _probe_flat_objects(self, probes: list[ScaleProbe], centers: Sequence[Size]) -> bool:
        """Probe up to two scales if the first probe found flat objects. Return whether this measured their diameter.

        If the voxel size shows that planes are far apart, the first probe has enlarged them already.
        """
        factors = suggest_flat_factors(probes[0], self._expected_diameter) if self._flatness == 1 else None
        while factors and len(probes) < 3 and not is_probed(factors, probes):
            probe = self.probe(centers, self._clamp_factors(factors), WINDOWS_PER_PROBE)
            if not probe.has_depth:
                # Objects cut off above or below also seem to be narrower. Keep the size measured by the previous probe.
                probe = probe._replace(extents=(self._expected_diameter,) * 3)
            probes.append(probe)
            # Even if peaks are low at every scale, a better fit with enlarged planes shows that objects are flat.
            if probe.fit > probes[0].fit:
                self._flatness = measure_flatness(probe, self._base)
            if probe.fit < MIN_FIT:
                return False
            factors = self._refine_factors(probe)
        return len(probes) > 1

    def _estimate_from_probes(self, probes: Sequence[ScaleProbe]) -> tuple[DiameterEstimate, ScaleProbe]:
        """Return the estimate and the probe at or near its scale."""
        best_probe = max(probes, key=lambda probe: probe.fit)
        count, num_windows = best_probe.num_objects, sum(probe.num_windows for probe in probes)
        if best_probe.fit < MIN_FIT_FOR_SUGGESTION:
            return DiameterEstimate(None, matches_model=False, num_objects=count, num_windows=num_windows), probes[0]
        factors = self._refine_factors(best_probe)
        if best_probe.fit >= MIN_FIT and is_probed(factors, probes) and not is_probed(factors, [best_probe]):
            factors = best_probe.factors  # The fit at the refined scale is worse.
        diameter = self._to_diameter(factors)
        matches_model = are_close(factors, self._base, MATCHING_DIAMETER_RATIO)
        if best_probe.fit < MIN_FIT:
            return DiameterEstimate(
                None, matches_model=False, num_objects=count, num_windows=num_windows, likely_diameter=diameter
            ), probes[0]
        return DiameterEstimate(diameter, matches_model, count, num_windows, diameter), best_probe

    def _to_diameter(self, factors: Factors) -> Diameter:
        z, y, x = (self._expected_diameter / factor for factor in factors)
        short_diameter = Diameter((x,), "px")
        # The short form must mean the same with and without the voxel size.
        is_same = all(
            are_close((z, y, x), short_diameter.to_voxels(size) or (x, x, x), 1.001)
            for size in (None, self._voxel_size)
        )
        return short_diameter if is_same else Diameter((z, y, x), "px")

    def _run_trial(
        self, estimate: DiameterEstimate, reference: ScaleProbe, probes: list[ScaleProbe], centers: Sequence[Size]
    ) -> DiameterEstimate:
        """Return a diameter with clearly higher confidence than `reference`, or `estimate` if there is none."""
        max_factors = self._probe_trials(probes, centers)
        if estimate.diameter is None:
            reference = next(probe for probe in probes if are_close(probe.factors, self._base, EQUAL_SCALE_RATIO))
        candidates = [probe for probe in probes if self._is_candidate(probe, reference, max_factors)]
        winner = choose_better_probe(reference, candidates, self._margin)
        return estimate if winner is None else self._summarize_trial(winner, reference, probes, max_factors)

    def _probe_trials(self, probes: list[ScaleProbe], centers: Sequence[Size]) -> Factors:
        """Probe the scales of a trial that have not been probed yet, and return the factors of the largest scale."""
        scales = [(self._scale_base(scale), num_windows) for scale, num_windows in TRIAL_SCALES]
        for factors, num_windows in scales:
            if not is_probed(factors, probes):
                probes.append(self.probe(centers, factors, num_windows))
        return scales[-1][0]

    def _is_candidate(self, probe: ScaleProbe, reference: ScaleProbe, max_factors: Factors) -> bool:
        """Return whether a trial may choose the scale of a probe instead of that of `reference`."""
        # Flat objects are not resolved along z unless planes are enlarged, by half of a measured flatness or more.
        min_stretch = 1.01 if self._voxel_size else self._flatness / 2
        min_factor = self._base[0] * min_stretch if self._flatness >= MIN_FLAT_ASPECT else 0.0
        is_plausible = probe.suggests_small_objects or (
            math.prod(probe.factors) <= EQUAL_SCALE_RATIO * math.prod(max_factors)
        )
        return is_plausible and probe.factors[0] >= min_factor and self._has_enough_objects(probe, reference)

    def _summarize_trial(
        self, winner: ScaleProbe, reference: ScaleProbe, probes: Sequence[ScaleProbe], max_factors: Factors
    ) -> DiameterEstimate:
        """Return the estimate of a trial in which `winner` had a higher confidence than `reference`."""
        diameter, num_windows = self._to_diameter(winner.factors), sum(probe.num_windows for probe in probes)
        is_smallest = are_close(winner.factors, max_factors, EQUAL_SCALE_RATIO)
        trial = DiameterTrial(winner.confidence or 0.0, reference.confidence or 0.0, len(probes), is_smallest)
        matches_model = are_close(winner.factors, self._base, MATCHING_DIAMETER_RATIO)
        return DiameterEstimate(diameter, matches_model, winner.num_objects, num_windows, diameter, trial)

    def _has_enough_objects(self, probe: ScaleProbe, reference: ScaleProbe) -> bool:
        """Return whether a probe has enough objects to be compared with `reference`.

        A probe that shows more of the stack than `reference` needs only as many object voxels as one object of the
        expected diameter. If objects are large, even its windows contain few objects, and cut off some of them.
        """
        expected_voxels = math.pi / 6 * self._expected_diameter**3
        shows_more = math.prod(probe.factors) * EQUAL_SCALE_RATIO < math.prod(reference.factors)
        return probe.num_objects >= MIN_OBJECTS or (shows_more and probe.num_object_voxels >= expected_voxels)

    def _is_settled(self, probes: Sequence[ScaleProbe]) -> bool:
        """Return whether another probe is unlikely to improve the estimate."""
        best_probe = max(probes, key=lambda probe: probe.fit)
        return best_probe.fit >= GOOD_FIT and are_close(
            self._refine_factors(best_probe), best_probe.factors, MATCHING_DIAMETER_RATIO
        )

    def _suggest_factors(self, probes: Sequence[ScaleProbe]) -> Factors | None:
        """Return the new factors suggested by the probe with the best fit that suggests any; None if no probe does."""
        for probe in sorted(probes, key=lambda probe: probe.fit, reverse=True):
            factors = self._refine_factors(probe)
            if probe.fit and not is_probed(factors, probes):
                return factors
        return None

    def probe(self, centers: Sequence[Size], factors: Factors, max_windows: int) -> ScaleProbe:
        """Score up to `max_windows` spaced windows at this scale, around the first `centers`."""
        scaled_size = [max(round(length * factor), 1) for length, factor in zip(self._size, factors, strict=True)]
        inner_size = [min(roi, length) for roi, length in zip(self._spec.input.roi_size, scaled_size, strict=True)]
        boxes = select_spaced_boxes(
            (make_box_around(position, self._size, inner_size, scaled_size) for position in centers), max_windows
        )
        decoded_windows = [self._decode_objects(window[None]) for window in self._score_boxes(boxes, inner_size)]
        covers_stack = math.prod(inner_size) >= FULL_COVERAGE_FRACTION * math.prod(scaled_size)
        probe = self._summarize_measurements(
            factors, np.concatenate([rows for rows, _ in decoded_windows]), len(boxes), covers_stack=covers_stack
        )
        if self._spec.confidence is None:
            return probe
        objects = Objects.concatenate([objects for _, objects in decoded_windows])
        confidence = predict_confidence(objects, self._expected_diameter, self._spec.confidence)
        return probe._replace(confidence=confidence, num_object_voxels=int(objects.voxel_counts.sum()))

    def _score_boxes(self, boxes: Sequence[Box], inner_size: Sequence[int]) -> Tensor:
        """Return the scores [N, K, *inner_size] of boxes of the image, each resampled to `inner_size` voxels."""
        grid = Grid.cover(as_size(inner_size), self._spec.input.roi_size, 0.0, self._spec.tiling)
        windows, region = torch.zeros((len(boxes), self._spec.input.channels, *grid.window_size)), grid.valid_region
        for window, part in zip(windows, cut_boxes(self._image, boxes), strict=True):
            window[(slice(None), *region)] = functional.interpolate(part[None], size=[*inner_size], mode="trilinear")[0]
            if grid.is_mirrored:
                fill_with_mirror_images(window, region)
        return self._score_windows(windows)[(slice(None), slice(None), *region)]

    def _decode_objects(self, scores: Tensor) -> tuple[NDArray[np.float64], Objects]:
        """Return the measurements of objects, float64 [N, 4], and the objects.

        The columns are the extents along (z, y, x), as in `measure_extents`, and the peak.
        """
        decoder = InstanceDecoder(self._spec, self._decoding, as_size(scores.shape[2:]), None)
        decoder.add(0, 0, scores)
        segmentation = decoder.finish()
        labels, objects = segmentation.pixels, segmentation.objects
        if objects is None:
            raise TypeError("The instance decoder returned no objects.")
        measurements = np.ones((len(objects), 4))
        measurements[:, :3] = measure_extents(labels, len(objects))
        if self._spec.get_activation(self._decoding.distance) == "sigmoid":
            measurements[:, 3] = objects.peaks
        return measurements, objects

    def _summarize_measurements(
        self, factors: Factors, measurements: NDArray[np.float64], num_windows: int, *, covers_stack: bool
    ) -> ScaleProbe:
        """Summarize the measurements of `_decode_objects`.

        If the depth of too few objects is known, objects are assumed to be as deep as they are wide. If there are fewer
        than `MIN_OBJECTS` objects but the windows show the whole stack, only the largest object is used.
        """
        is_whole = np.isfinite(measurements[:, :3])
        num_objects = int(is_whole[:, 1:].sum()) // 2
        if num_objects < MIN_OBJECTS:
            complete_objects = measurements[is_whole.all(axis=1)]
            if not covers_stack or not len(complete_objects):
                return ScaleProbe(factors, (1.0, 1.0, 1.0), num_objects, 0.0, num_windows)
            measurements = complete_objects[complete_objects[:, :3].prod(axis=1).argmax()][None]
            is_whole = np.isfinite(measurements[:, :3])
        width = float(np.median(measurements[:, 1:3][is_whole[:, 1:]]))
        depths = measurements[is_whole[:, 0], 0]
        has_depth = len(depths) >= min(MIN_OBJECTS, num_objects)
        depth = float(np.median(depths)) if has_depth else width
        peak = float(np.median(measurements[is_whole[:, 1:].any(axis=1), 3]))
        size_error = math.log(depth * width**2 / self._expected_diameter**3) / 3
        aspect_error = max(abs(math.log(width / depth)) - math.log(MAX_ROUND_ASPECT), 0.0)
        log_scale = math.log(factors[1] / self._base[1])
        fit = peak * math.exp(
            -((size_error / SIZE_SIGMA) ** 2 + (aspect_error / ASPECT_SIGMA) ** 2 + (log_scale / SCALE_SIGMA) ** 2) / 2
        )
        return ScaleProbe(factors, (depth, width, width), num_objects, fit, num_windows, has_depth=has_depth)

    def _refine_factors(self, probe: ScaleProbe) -> Factors:
        """Return the factors at which the objects of a probe would have the expected diameter, clamped to the limits.

        Light is blurred along z, so the measured depth is unreliable. This depth is used only if it differs from the
        expected depth by more than a factor of `MAX_ROUND_ASPECT`.
        """
        base_z, base_y, base_x = self._base[0] * self._flatness, *self._base[1:]
        depth, width = base_z * probe.extents[0] / probe.factors[0], base_y * probe.extents[1] / probe.factors[1]
        flatness = width / depth
        z_stretch = flatness / min(max(flatness, 1 / MAX_ROUND_ASPECT), MAX_ROUND_ASPECT)
        scale = self._expected_diameter / (depth * width**2 * z_stretch) ** (1 / 3)
        return self._clamp_factors((base_z * scale * z_stretch, base_y * scale, base_x * scale))

    def _scale_base(self, scale: float, flatness: float = 1.0) -> Factors:
        """Return the clamped factors at a scale relative to the base grid, for objects of this flatness."""
        z, y, x = self._base
        return self._clamp_factors((z * scale * flatness, y * scale, x * scale))

    def _clamp_factors(self, factors: Factors) -> Factors:
        """Clamp factors to between 1 / `MAX_SCALE_RATIO` of the base grid and `compute_max_factors`.

        No axis becomes shorter than the window, unless it already is, because padding reduces the score quality.
        """
        clamped_factors = []
        axes = zip(factors, self._base, self._spec.input.roi_size, self._size, strict=True)
        for max_factor, (factor, base, roi, length) in zip(compute_max_factors(factors, self._base), axes, strict=True):
            min_factor = max(base / MAX_SCALE_RATIO, min(roi / length, base))
            clamped_factors.append(min(max(factor, min_factor), max_factor))
        return clamped_factors[0], clamped_factors[1], clamped_factors[2]
