"""The object diameter of a stack: an estimate, or the default diameter of the model if it suits the stack as well."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence

from service.core.buffers import LARGE_ARRAY_BYTES
from service.core.quantities import Diameter, Size
from service.core.types import Extent, Volume
from service.inference.diameter.estimation import (
    MIN_LOG_ODDS_GAIN,
    MIN_OBJECTS,
    WINDOWS_PER_PROBE,
    DiameterEstimator,
)
from service.inference.diameter.scale_probe import (
    EQUAL_SCALE_RATIO,
    LOG_ODDS_TOLERANCE,
    MATCHING_DIAMETER_RATIO,
    MAX_SCALE_RATIO,
    ScaleProbe,
    are_close,
    choose_better_probe,
)
from service.inference.diameter.window_selection import rank_by_contrast
from service.inference.preprocessing.normalize import VolumeChannel
from service.inference.preprocessing.resample import compute_scale_factors
from service.inference.types import DiameterEstimate
from service.inference.windows.sliding_window import Image, ScoreWindows
from service.models.spec import ModelSpec

# Confidence at the default diameter from which no other diameter is tried. Models with a lower F1 score on stacks like
# their training stacks need only a confidence of that score.
CLEAR_CONFIDENCE = 0.9

# Maximum ratio by which the default diameter is corrected. Most objects that are much smaller or larger would not be
# found at the default diameter.
MAX_CORRECTION_RATIO = 1.5

# Maximum number of stacks whose diameter estimates are cached.
MAX_CACHED_STACKS = 1024


def measure_diameter(
    image: Image, volume: Extent, spec: ModelSpec, score_windows: ScoreWindows, default: Diameter | None = None
) -> DiameterEstimate:
    """Estimate the object diameter in the normalized image of a volume.

    default  default diameter of a model with calibrated confidence. It is returned unless the objects look clearly more
             like the objects that the model knows if the estimate is used, or have another size where the confidence is
             as high as in training. None: return the estimate

    The result is deterministic. Raises BadParameter if the default diameter is implausible for the volume, and the same
    errors as `score_windows`.
    """
    estimator = DiameterEstimator(image, compute_scale_factors(volume, spec), spec, score_windows, volume.voxel_size)
    if default is None:
        return estimator.estimate()
    better_estimate = _find_better_estimate(estimator, image, volume, spec, default)
    if better_estimate is None:
        return DiameterEstimate(default, matches_model=False, num_objects=0, num_windows=0, default=default)
    return better_estimate._replace(matches_model=False, default=default)


def _find_better_estimate(
    estimator: DiameterEstimator, image: Image, volume: Extent, spec: ModelSpec, default: Diameter
) -> DiameterEstimate | None:
    """Return an estimate that suits the stack clearly better than the default diameter, or None.

    If the confidence at the default diameter is as high as in training, the estimate is measured at that diameter.
    """
    default_factors = compute_scale_factors(volume, spec, default)
    if math.prod(default_factors) * MAX_SCALE_RATIO**3 < math.prod(compute_scale_factors(volume, spec)):
        # The windows would show too many voxels of the stack.
        return None
    centers = rank_by_contrast(image, spec.input.roi_size)
    default_probe = estimator.probe(centers, default_factors, WINDOWS_PER_PROBE)
    expected_f1 = CLEAR_CONFIDENCE if spec.lineage is None else spec.lineage.after
    if (default_probe.confidence or 0.0) >= min(expected_f1, CLEAR_CONFIDENCE):
        return _correct_default(estimator, centers, default_probe, spec, default)
    estimate = estimator.estimate(centers)
    if estimate.diameter is None:
        return None
    factors = compute_scale_factors(volume, spec, estimate.diameter)
    if are_close(factors, default_factors, MATCHING_DIAMETER_RATIO):
        return None
    probe = estimator.probe(centers, factors, WINDOWS_PER_PROBE)
    if probe.num_objects < MIN_OBJECTS or probe.fit < default_probe.fit:
        # Parts of objects that are cut off by the windows can have a high confidence.
        return None
    return None if choose_better_probe(default_probe, [probe], MIN_LOG_ODDS_GAIN) is None else estimate


def _correct_default(
    estimator: DiameterEstimator, centers: Sequence[Size], default_probe: ScaleProbe, spec: ModelSpec, default: Diameter
) -> DiameterEstimate | None:
    """Return the diameter of the objects that are found at the default diameter, or None if it is about the default.

    If the default diameter is too large, small objects are missed, although the others are found reliably. The ratios
    between depth, height and width remain, because they were measured in annotated objects.
    """
    if default_probe.num_objects < MIN_OBJECTS or spec.input.diameter is None:
        return None
    ratio = math.prod(default_probe.extents) ** (1 / 3) / spec.input.diameter
    if not EQUAL_SCALE_RATIO <= max(ratio, 1 / ratio) <= MAX_CORRECTION_RATIO:
        return None
    z, y, x = default_probe.factors
    probe = estimator.probe(centers, (z / ratio, y / ratio, x / ratio), WINDOWS_PER_PROBE)
    if probe.num_objects < MIN_OBJECTS or probe.fit <= default_probe.fit:
        return None
    if probe.log_odds < default_probe.log_odds - LOG_ODDS_TOLERANCE:
        return None
    diameter, num_windows = default.scale(ratio), default_probe.num_windows + probe.num_windows
    return DiameterEstimate(diameter, matches_model=False, num_objects=probe.num_objects, num_windows=num_windows)


class DiameterCache:
    """Thread-safe cache of the diameter estimates of one network.

    Users often segment a stack again, for a different output or for measurements, and estimating the diameter of a
    small stack takes longer than segmenting it. Stacks larger than `LARGE_ARRAY_BYTES` are not cached: hashing their
    pixels costs more than estimating again.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._estimates: OrderedDict[tuple[bytes, Diameter | None], DiameterEstimate] = OrderedDict()
        self._lock = threading.Lock()

    def measure(
        self, image: Image, volume: Extent, score_windows: ScoreWindows, default: Diameter | None
    ) -> DiameterEstimate:
        """Call `measure_diameter` without the cache."""
        return measure_diameter(image, volume, self._spec, score_windows, default)

    def get(
        self, image: Image, volume: Volume, score_windows: ScoreWindows, default: Diameter | None
    ) -> DiameterEstimate:
        """Call `measure_diameter`, or return its result for the same pixels, voxel size and default diameter."""
        if volume.nbytes > LARGE_ARRAY_BYTES:
            return self.measure(image, volume, score_windows, default)
        key = _hash_volume(volume), default
        with self._lock:
            if key in self._estimates:
                self._estimates.move_to_end(key)
                return self._estimates[key]
        diameter_estimate = self.measure(image, volume, score_windows, default)
        with self._lock:
            self._estimates[key] = diameter_estimate
            if len(self._estimates) > MAX_CACHED_STACKS:
                self._estimates.popitem(last=False)
        return diameter_estimate


def _hash_volume(volume: Volume) -> bytes:
    voxel_size = None if volume.voxel_size is None else tuple(volume.voxel_size)
    digest = hashlib.sha256(repr((volume.shape, volume.dtype.str, voxel_size)).encode())
    for index in range(volume.shape[0]):
        for block in VolumeChannel(volume, index):
            digest.update(block.tobytes())
    return digest.digest()
