"""Evaluation scores of an instance segmentation model, and of a classical method for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, gaussian_filter
from skimage.feature import peak_local_max
from skimage.filters import threshold_otsu
from skimage.segmentation import watershed

from service.core.quantities import Diameter, DiameterSetting, VoxelSize, parse_diameter
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.training.examples import compute_mean_diameter, compute_median_extents
from service.training.stacks.overlaps import (
    Labels,
    compute_adapted_rand_error,
    compute_variation_of_information,
    tabulate_overlaps,
)

HEADER = (
    "| stack | method | diameter | true | found | F1 at IoU 0.5 | F1 at IoU 0.75 | mean IoU | splits | merges"
    " | VOI split | VOI merge | adapted Rand error |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


class Scores(NamedTuple):
    """Scores of labels compared with the ground truth. The field names are members of `stackseg evaluate --json`.

    true           number of objects in the ground truth
    found          number of objects in the labels
    f1, f1_strict  F1 score 2 TP / (2 TP + FP + FN); objects match if their intersection over union (IoU) is above 0.5,
                   or above 0.75 for `f1_strict`
    iou            mean IoU of the objects that match at an IoU above 0.5; 0 if there are no matches
    splits         number of true objects that each contain most of two or more found objects
    merges         number of found objects that each contain most of two or more true objects
    voi_split, voi_merge, adapted_rand_error  errors in voxels of true objects, as in `service.training.stacks.overlaps`
    """

    true: int
    found: int
    f1: float
    f1_strict: float
    iou: float
    splits: int
    merges: int
    voi_split: float
    voi_merge: float
    adapted_rand_error: float


def score(truth: Labels, labels: Labels, unknown: NDArray[np.bool_] | None = None) -> Scores:
    """Compare two label volumes of the same shape. Background is 0. Labels of matching objects may differ.

    An object has at most one match with an intersection over union above 0.5 (Kirillov et al. 2019).

    unknown  mask of voxels that are not annotated, and therefore not compared. Found objects with more unknown than
             known voxels count only if they match an object
    """
    known = slice(None) if unknown is None else ~unknown
    table = tabulate_overlaps(truth[known], labels[known])
    voi_split, voi_merge = compute_variation_of_information(table)
    pairs = table.select((table.true > 0) & (table.found > 0))
    true_sizes, found_sizes = table.true_sizes[pairs.true], table.found_sizes[pairs.found]
    iou = pairs.voxels / (true_sizes + found_sizes - pairs.voxels)
    found_count = table.found_count
    if unknown is not None:
        found_count -= _count_undecided(labels, unknown, pairs.found[iou > 0.5])
    object_count = table.true_count + found_count
    matches = iou[iou > 0.5]
    return Scores(
        true=table.true_count,
        found=found_count,
        f1=_compute_f1(len(matches), object_count),
        f1_strict=_compute_f1(int(np.count_nonzero(iou > 0.75)), object_count),
        iou=float(matches.mean()) if len(matches) else 0.0,
        splits=_count_repeated(pairs.true[pairs.voxels / found_sizes > 0.5]),
        merges=_count_repeated(pairs.found[pairs.voxels / true_sizes > 0.5]),
        voi_split=voi_split,
        voi_merge=voi_merge,
        adapted_rand_error=compute_adapted_rand_error(table),
    )


def _count_undecided(labels: Labels, unknown: NDArray[np.bool_], matched: NDArray[np.int64]) -> int:
    """Count the objects with more unknown than known voxels that are not among the matched ones.

    matched  positions, from 1, of the matched objects among the objects with known voxels
    """
    values, known_sizes = np.unique(labels[~unknown & (labels > 0)], return_counts=True)
    unknown_labels = labels[unknown]
    unknown_labels = unknown_labels[np.isin(unknown_labels, values)]
    unknown_sizes = np.bincount(np.searchsorted(values, unknown_labels), minlength=len(values))
    is_undecided = unknown_sizes > known_sizes
    is_undecided[matched - 1] = False
    return int(np.count_nonzero(is_undecided))


def _count_repeated(indices: NDArray[np.int64]) -> int:
    """Return how many different indices occur more than once."""
    return int(np.count_nonzero(np.bincount(indices) > 1))


def segment_classically(image: NDArray[Any], diameter: float) -> Labels:
    """Segment with a Gaussian filter, Otsu's threshold, and a watershed from the maxima of the distance transform.

    Image and labels have the axes [Z, Y, X]. `diameter` is in voxels. The maxima are at least 0.35 diameters apart.
    """
    smoothed_image = gaussian_filter(image.astype(np.float32), 1)
    foreground = smoothed_image > threshold_otsu(smoothed_image)  # type: ignore[no-untyped-call]
    distance = gaussian_filter(distance_transform_edt(foreground).astype(np.float32), 1)
    min_distance = max(1, round(0.35 * diameter))
    peaks = peak_local_max(  # type: ignore[no-untyped-call]
        distance, min_distance=min_distance, labels=foreground.astype(np.int32), exclude_border=False
    )
    markers = np.zeros(image.shape, np.int32)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    return np.asarray(watershed(-distance, markers, mask=foreground))  # type: ignore[no-untyped-call]


def _compute_f1(match_count: int, object_count: int) -> float:
    return 2 * match_count / object_count if object_count else 1.0


def get_stack_name(image: Path) -> str:
    """Return the name of a stack for tables: the folder name if the file is called `image`, else the file name."""
    return image.parent.name if image.stem == "image" else image.stem


def resolve_diameter(setting: str, truth: Labels, voxel_size: VoxelSize | None = None) -> DiameterSetting:
    """Parse a diameter, or compute it from the ground truth if the setting is `mean` or `extents`.

    `mean` is the mean diameter of spheres with the volumes of the objects, scaled by the anisotropy of the voxels.
    `extents` is the median extent along each axis. Raises BadParameter if the setting is invalid.
    """
    if setting == "mean":
        anisotropy = 1.0 if voxel_size is None else voxel_size.anisotropy
        return Diameter((compute_mean_diameter(truth) * anisotropy ** (1 / 3),), "px")
    if setting == "extents":
        extents = compute_median_extents(truth)
        z, y, x = (1.0, 1.0, 1.0) if extents is None else extents.tolist()
        return Diameter((z, y, x), "px")
    return parse_diameter(setting)


class ScoreRow(NamedTuple):
    """A row of the table: the method, the object diameter used, and the scores of the method."""

    method: str
    diameter: str
    scores: Scores


def score_model(
    runner: ModelRunner,
    image: Volume,
    truth: Labels,
    diameter: str | None,
    unknown: NDArray[np.bool_] | None = None,
) -> ScoreRow:
    """Segment and score a stack. `diameter` is a setting for `resolve_diameter`, or None for the original resolution.

    Raises the errors of `resolve_diameter` and `segment`.
    """
    options = Options(diameter=None if diameter is None else resolve_diameter(diameter, truth, image.voxel_size))
    result = segment(runner, image, options)
    diameter_text = (
        "original resolution" if result.diameter_text is None else result.diameter_text.replace("; stated", "")
    )
    return ScoreRow(runner.spec.identifier, diameter_text, score(truth, result.segmentation.pixels, unknown))


def score_classical(image: Volume, truth: Labels, unknown: NDArray[np.bool_] | None = None) -> ScoreRow:
    """Score the classical method on the first channel, using the mean diameter of the true objects."""
    diameter = compute_mean_diameter(truth)
    labels = segment_classically(image.read_all()[0], diameter)
    return ScoreRow("classical", str(Diameter((diameter,), "px")), score(truth, labels, unknown))


def format_row(stack: str, row: ScoreRow) -> str:
    """Format a row of the table below `HEADER`."""
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.scores]
    return f"| {' | '.join([stack, row.method, row.diameter, *cells])} |"
