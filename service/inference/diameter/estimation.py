"""Estimate the diameter of the objects of a stack from a few windows of it at several scales.

A network finds objects best at the width that it was trained for; at others it merges or splits them, or is less sure
of their centres. So the scale that fits is the one at which what it finds has that width, with high peaks of the
distance; what was found at one scale tells which to try next. Cellpose (Stringer et al. 2021) has a model of its own
for a first guess, and refines it likewise by a first segmentation. Where the model doubts what it would find with that,
or nothing fits well, the width is taken at which it doubts the least, by the confidence that results are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from service.core.quantities import Diameter, Size, VoxelSize
from service.core.types import Objects
from service.inference.decoding.instances import InstanceDecoder
from service.inference.decoding.steering import require_instances
from service.inference.diameter.confidence import judge
from service.inference.diameter.places import Box, box_around, choose_apart, cut_boxes, signals
from service.inference.types import DiameterTrial, Sizing
from service.inference.windows.grid import as_size
from service.inference.windows.sliding_window import Image, ScoreWindows
from service.models.spec import ModelSpec

Factors = tuple[float, float, float]

# Scales of the first looks, and how many windows each gets: at a small scale a window shows more of the stack.
FIRST_LOOKS = ((1.0, 4), (2.0, 4), (0.4, 2))
NEXT_LOOKS, WINDOWS = 3, 4

# Fewer objects do not tell how wide others are, unless windows show so much of the stack that there are hardly others.
FEWEST, WHOLE = 5, 0.9

# How far widths, flatness and scales may be off, as standard deviations of their logarithms.
OFF, FLAT, FAR = 0.5, 1.0, 2.5

# Below the first, a width is not even worth a try; below the second, nothing that was found looks like what the model
# knows; from the third on, a first look is enough.
LEAST_GUESS, LEAST_FIT, GOOD_FIT = 0.2, 0.5, 0.65

# Where the first confidence is doubtful, or no scale fits well, these scales are tried as well, in so many windows, and
# none larger is taken. Logarithms of the odds of being right are compared: a scale has to be better by the margin, and
# the smallest is taken of those that are hardly worse than the best, as a large scale takes many windows. Below the
# least confidence it is grain that is seen. Margin and least confidence are checked by
# `python -m scripts.recipes.trials`.
TRIED = ((0.2, 2), (1.0, 4), (2.8, 4))
MARGIN, HARDLY, LEAST_CONFIDENCE = 1.0, 1.0, 0.001

# Objects that are up to so many times as wide as deep are found as well as round ones.
ROUND = 1.5

# Objects of recorded stacks are outlined so many times as deep as wide, in micrometres: where their blurred light ends.
DEEPER = 1.25

# Objects that are so many times as wide as wanted, or as narrow, need no resampling; scales so near are one.
FITTING, ALIKE = 1.2, 1.15

# Scales are not taken further from 1 than this: beyond, the sampling has lost the objects, or there are none.
FARTHEST = 5.0


class ScaleProbe(NamedTuple):
    """Objects found at one scale, and how well it suits the model.

    factors  voxels of the scaled grid per voxel of the image, along (z, y, x)
    widths   median extents of objects along (z, y, x), in voxels of the scaled grid; y and x have one value
    objects  that widths were measured by
    fit      how well this scale suits the model, 0 to 1; 0 where too few objects were found
    windows  that were looked at
    confidence  in what was found, 0 to 1; None where that cannot be told
    voxels      of all that was found, in voxels of the scaled grid
    """

    factors: Factors
    widths: Factors
    objects: int
    fit: float
    windows: int
    confidence: float | None = None
    voxels: int = 0

    @property
    def log_odds(self) -> float:
        """Logarithm of the odds that what was found is right, -inf where that cannot be told."""
        return -math.inf if self.confidence is None else math.log(self.confidence / max(1 - self.confidence, 1e-15))


class DiameterEstimator:
    """Measures the objects of one image for a model of instances that says which width it wants.

    image  normalised, at the sampling of its volume
    base   voxels of the grid on which the model works by itself per voxel of the image, along (z, y, x)
    score_windows  computes the scores of a few windows at a time, which have zeros where the image ends
    voxel_size  of the image; None: not known
    margin  by which a width of a trial has to be better
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        image: Image,
        base: Factors,
        spec: ModelSpec,
        score_windows: ScoreWindows,
        voxel_size: VoxelSize | None = None,
        margin: float = MARGIN,
    ) -> None:
        if spec.input.diameter is None:
            raise ValueError(f"{spec.name} does not say how wide it wants objects to be.")
        self._image, self._base, self._spec, self._score_windows = image, base, spec, score_windows
        self._voxel_size, self._margin = voxel_size, margin
        self._flatness = expect_flatness(voxel_size, base)
        # Fragments tell that a scale does not fit.
        choices = ("minimum_fraction", "min_confidence", "min_relative_odds")
        self._decoding = require_instances(spec).model_copy(update=dict.fromkeys(choices, 0.0))
        self._wanted = spec.input.diameter
        self._size = as_size(image.shape[2:])

    def estimate(self) -> Sizing:
        """Estimate the diameter, always the same for one image and one network. Raises what `score_windows` raises."""
        places = signals(self._image, self._spec.input.roi_size)
        seen = self._probe_scales(places)
        sizing, used = self._measured(seen)
        calibration = self._spec.confidence
        if calibration is None or used.confidence is None:
            return sizing
        doubtful = used.confidence < calibration.threshold
        # Pieces of objects that are too large for windows have a fair width and middle, but seldom a good fit.
        if doubtful or max(probe.fit for probe in seen) < GOOD_FIT:
            return self._try(sizing, used, seen, places)
        return sizing

    def _probe_scales(self, places: Sequence[Size]) -> list[ScaleProbe]:
        """Probe the first scales, and then those that earlier probes suggest, until another would hardly tell more."""
        seen = list[ScaleProbe]()
        for scale, windows in FIRST_LOOKS:
            seen.append(self.probe(places, self._scaled(scale, self._flatness), windows))
            if self._settled(seen):
                return seen
        for _ in range(NEXT_LOOKS):
            further = self._next(seen)
            if further is None or self._settled(seen):
                break
            seen.append(self.probe(places, further, WINDOWS))
        return seen

    def _measured(self, seen: Sequence[ScaleProbe]) -> tuple[Sizing, ScaleProbe]:
        """Return the estimate from what was seen, and the probe at or near the scale that it means."""
        best = max(seen, key=lambda probe: probe.fit)
        windows = sum(probe.windows for probe in seen)
        if best.fit < LEAST_GUESS:
            return Sizing(None, fits=False, objects=best.objects, windows=windows), seen[0]
        factors = self._refined(best)
        diameter = self._diameter(factors)
        if best.fit < LEAST_FIT:
            return Sizing(None, fits=False, objects=best.objects, windows=windows, guess=diameter), seen[0]
        return Sizing(diameter, _near(factors, self._base, FITTING), best.objects, windows, diameter), best

    def _diameter(self, factors: Factors) -> Diameter:
        z, y, x = (self._wanted / factor for factor in factors)
        short = Diameter((x,), "px")
        # It has to mean the same to who does not know the voxel size.
        same = all(_near((z, y, x), short.in_voxels(size) or (x, x, x), 1.001) for size in (None, self._voxel_size))
        return short if same else Diameter((z, y, x), "px")

    def _try(self, sizing: Sizing, used: ScaleProbe, seen: list[ScaleProbe], places: Sequence[Size]) -> Sizing:
        """Return the width at which the model doubts much less than at the one `used`; `sizing` where there is none."""
        largest = self._probe_trials(seen, places)
        if sizing.diameter is None:
            used = next(probe for probe in seen if _near(probe.factors, self._base, ALIKE))
        most = ALIKE * math.prod(largest)
        others = [probe for probe in seen if math.prod(probe.factors) <= most and self._shows_enough(probe, used)]
        chosen = _choose_clearly_better(used, others, self._margin)
        return sizing if chosen is None else self._sum_up_trial(chosen, used, seen, largest)

    def _probe_trials(self, seen: list[ScaleProbe], places: Sequence[Size]) -> Factors:
        """Probe the scales of a trial that were not seen yet; return the factors of the largest."""
        tried = [(self._scaled(scale), windows) for scale, windows in TRIED]
        for factors, windows in tried:
            if not _is_known(factors, seen):
                seen.append(self.probe(places, factors, windows))
        largest, _ = tried[-1]
        return largest

    def _sum_up_trial(
        self, chosen: ScaleProbe, used: ScaleProbe, seen: Sequence[ScaleProbe], largest: Factors
    ) -> Sizing:
        """Return the estimate by a trial, in which `chosen` was better than the scale `used`."""
        diameter, looked = self._diameter(chosen.factors), sum(probe.windows for probe in seen)
        narrowest = _near(chosen.factors, largest, ALIKE)
        trial = DiameterTrial(chosen.confidence or 0.0, used.confidence or 0.0, len(seen), narrowest)
        fits = _near(chosen.factors, self._base, FITTING)
        return Sizing(diameter, fits, chosen.objects, looked, diameter, trial)

    def _shows_enough(self, probe: ScaleProbe, used: ScaleProbe) -> bool:
        """Return whether there are enough objects, or windows that show more than those `used` and hold as much as one.

        At a smaller scale large objects are few, and faces of the windows cut them.
        """
        usual = math.pi / 6 * self._wanted**3
        shows_more = math.prod(probe.factors) * ALIKE < math.prod(used.factors)
        return probe.objects >= FEWEST or (shows_more and probe.voxels >= usual)

    def _settled(self, seen: Sequence[ScaleProbe]) -> bool:
        """Return whether another probe would hardly tell more."""
        best = max(seen, key=lambda probe: probe.fit)
        return best.fit >= GOOD_FIT and _near(self._refined(best), best.factors, FITTING)

    def _next(self, seen: Sequence[ScaleProbe]) -> Factors | None:
        """Return the factors that the best probe suggests, else the next best; None where none suggests new ones."""
        for probe in sorted(seen, key=lambda probe: probe.fit, reverse=True):
            factors = self._refined(probe)
            if probe.fit and not _is_known(factors, seen):
                return factors
        return None

    def probe(self, places: Sequence[Size], factors: Factors, most: int) -> ScaleProbe:
        """Score up to `most` windows at this scale, around the first of `places` that are apart."""
        scaled = [max(round(length * factor), 1) for length, factor in zip(self._size, factors, strict=True)]
        inner = [min(edge, length) for edge, length in zip(self._spec.input.roi_size, scaled, strict=True)]
        boxes = choose_apart((box_around(place, self._size, inner, scaled) for place in places), most)
        decoded = [self._objects(window[None]) for window in self._score_boxes(boxes, inner)]
        whole = math.prod(inner) >= WHOLE * math.prod(scaled)
        probe = self._summary(factors, np.concatenate([rows for rows, _ in decoded]), len(boxes), whole=whole)
        if self._spec.confidence is None:
            return probe
        objects = Objects.concatenate([objects for _, objects in decoded])
        confidence = judge(objects, self._wanted, self._spec.confidence)
        return probe._replace(confidence=confidence, voxels=int(objects.voxels.sum()))

    def _score_boxes(self, boxes: Sequence[Box], inner: Sequence[int]) -> Tensor:
        """Return the scores [N, K, *inner] of boxes of the image that are resampled to `inner` voxels."""
        roi = self._spec.input.roi_size
        windows = torch.zeros((len(boxes), self._spec.input.channels, *roi))
        before = [(edge - length) // 2 for edge, length in zip(roi, inner, strict=True)]
        inside = tuple(slice(first, first + length) for first, length in zip(before, inner, strict=True))
        for window, part in zip(windows, cut_boxes(self._image, boxes), strict=True):
            window[(slice(None), *inside)] = functional.interpolate(part[None], size=[*inner], mode="trilinear")[0]
        return self._score_windows(windows)[(slice(None), slice(None), *inside)]

    def _objects(self, scores: Tensor) -> tuple[NDArray[np.float64], Objects]:
        """Return [N, 4], extents along (z, y, x), NaN where a face cuts it, and the peak distance; and the objects."""
        decoder = InstanceDecoder(self._spec, self._decoding, as_size(scores.shape[2:]), None)
        decoder.add(0, 0, scores)
        segmentation = decoder.finish()
        labels, objects = segmentation.pixels, segmentation.objects
        if objects is None:
            raise TypeError("The decoder of instances has returned no objects.")
        places = np.nonzero(labels)
        owner, count = labels[places].astype(np.intp) - 1, len(objects)
        rows = np.ones((count, 4))
        if self._spec.activation == "sigmoid":
            rows[:, 3] = objects.peaks
        for axis, (place, edge) in enumerate(zip(places, labels.shape, strict=True)):
            low, high = np.full(count, edge), np.full(count, -1)
            np.minimum.at(low, owner, place)
            np.maximum.at(high, owner, place)
            rows[:, axis] = np.where((low == 0) | (high == edge - 1), np.nan, high - low + 1)
        return rows, objects

    def _summary(self, factors: Factors, objects: NDArray[np.float64], windows: int, *, whole: bool) -> ScaleProbe:
        """Summarise the rows of `_objects`. Objects that no axis shows whole are taken to be as deep as wide.

        Of fewer than `FEWEST` objects the largest one counts where the windows show the `whole` stack.
        """
        known = np.isfinite(objects[:, :3])
        count = int(known[:, 1:].sum()) // 2
        if count < FEWEST:
            complete = objects[known.all(axis=1)]
            if not whole or not len(complete):
                return ScaleProbe(factors, (1.0, 1.0, 1.0), count, 0.0, windows)
            objects = complete[complete[:, :3].prod(axis=1).argmax()][None]
            known = np.isfinite(objects[:, :3])
        wide = float(np.median(objects[:, 1:3][known[:, 1:]]))
        deep = float(np.median(objects[known[:, 0], 0])) if known[:, 0].sum() >= min(FEWEST, count) else wide
        peak = float(np.median(objects[known[:, 1:].any(axis=1), 3]))
        off = math.log(deep * wide**2 / self._wanted**3) / 3
        flat = max(abs(math.log(wide / deep)) - math.log(ROUND), 0.0)
        far = math.log(factors[1] / self._base[1])
        fit = peak * math.exp(-((off / OFF) ** 2 + (flat / FLAT) ** 2 + (far / FAR) ** 2) / 2)
        return ScaleProbe(factors, (deep, wide, wide), count, fit, windows)

    def _refined(self, probe: ScaleProbe) -> Factors:
        """Return the factors at which the objects would be as wide as the model wants them, as far as allowed.

        Light blurs objects along z, so that what is seen of them tells their depth badly: it counts where it differs
        from what is expected by more than `ROUND`.
        """
        base_z, base_y, base_x = self._base[0] * self._flatness, *self._base[1:]
        deep, wide = base_z * probe.widths[0] / probe.factors[0], base_y * probe.widths[1] / probe.factors[1]
        flatness = wide / deep
        stretch = flatness / min(max(flatness, 1 / ROUND), ROUND)
        scale = self._wanted / (deep * wide**2 * stretch) ** (1 / 3)
        return self._allowed((base_z * scale * stretch, base_y * scale, base_x * scale))

    def _scaled(self, scale: float, flatness: float = 1.0) -> Factors:
        """Return the factors at a scale of `base`, as far as allowed, for objects that are flat there."""
        z, y, x = self._base
        return self._allowed((z * scale * flatness, y * scale, x * scale))

    def _allowed(self, factors: Factors) -> Factors:
        """Clamp factors to `FARTHEST` of `base`. An axis as long as the window stays so: padding confuses networks."""
        allowed = []
        for factor, usual, edge, length in zip(factors, self._base, self._spec.input.roi_size, self._size, strict=True):
            least = max(usual / FARTHEST, min(edge / length, usual))
            allowed.append(min(max(factor, least), usual * FARTHEST))
        return allowed[0], allowed[1], allowed[2]


def expect_flatness(voxel_size: VoxelSize | None, base: Factors) -> float:
    """Return how many times as wide as deep objects should be in voxels of the `base` grid, 1 where it is not known."""
    if voxel_size is None:
        return 1.0
    z, y, x = (edge / factor for edge, factor in zip(voxel_size, base, strict=True))
    return max(VoxelSize(z, y, x).anisotropy / DEEPER, 1.0)


def _near(one: Factors, other: Factors, ratio: float) -> bool:
    return all(abs(math.log(a / b)) < math.log(ratio) for a, b in zip(one, other, strict=True))


def _is_known(factors: Factors, seen: Iterable[ScaleProbe]) -> bool:
    return any(_near(factors, probe.factors, ALIKE) for probe in seen)


def _choose_clearly_better(used: ScaleProbe, others: Sequence[ScaleProbe], margin: float) -> ScaleProbe | None:
    """Return the smallest scale that is better than the one `used` by a margin, and hardly worse than the best one."""
    enough = [probe for probe in others if (probe.confidence or 0.0) >= LEAST_CONFIDENCE]
    least = max((probe.log_odds for probe in enough), default=-math.inf)
    least = max(least - HARDLY, used.log_odds + margin)
    better = [probe for probe in enough if probe.log_odds >= least]
    return min(better, key=lambda probe: math.prod(probe.factors), default=None)
