"""Scores of an instance segmentation model, and of a classical method for comparison."""

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
from service.training.examples import mean_diameter, median_extents

Labels = NDArray[Any]

HEADER = (
    "| stack | method | diameter | true | found | F1 at IoU 0.5 | F1 at IoU 0.75 | mean IoU | splits | merges |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


class Scores(NamedTuple):
    """Agreement of labels with the ground truth.

    true, found    number of objects in the ground truth and in the labels
    f1, f1_strict  2 TP / (true + found) with matches above an intersection over union of 0.5, or of 0.75
    iou            mean intersection over union of the matches at 0.5; 0 if there are no matches
    splits         number of true objects that contain most of two or more found objects
    merges         number of found objects that contain most of two or more true objects
    """

    true: int
    found: int
    f1: float
    f1_strict: float
    iou: float
    splits: int
    merges: int


def score(truth: Labels, labels: Labels) -> Scores:
    """Compare two label volumes of the same shape. Background is 0; the numbering of objects does not matter.

    Above an intersection over union of 0.5, an object has at most one match, so the matching is unique (Kirillov 2019).
    """
    shared = _count_shared_voxels(truth, labels)
    true_sizes, found_sizes = shared.sum(axis=1)[1:, None], shared.sum(axis=0)[None, 1:]
    shared_objects = shared[1:, 1:]
    iou = shared_objects / (true_sizes + found_sizes - shared_objects)
    true, found = shared_objects.shape
    matches = iou[iou > 0.5]
    return Scores(
        true=true,
        found=found,
        f1=_f1(len(matches), true + found),
        f1_strict=_f1(int(np.count_nonzero(iou > 0.75)), true + found),
        iou=float(matches.mean()) if len(matches) else 0.0,
        splits=int(np.count_nonzero((shared_objects / found_sizes > 0.5).sum(axis=1) > 1)),
        merges=int(np.count_nonzero((shared_objects / true_sizes > 0.5).sum(axis=0) > 1)),
    )


def segment_classically(image: NDArray[Any], diameter: float) -> Labels:
    """Segment with a Gaussian filter, Otsu's threshold, and a watershed from maxima of the distance transform.

    Image and labels are [Z, Y, X]. Maxima are at least 0.35 diameters apart; `diameter` is in voxels.
    """
    smooth = gaussian_filter(image.astype(np.float32), 1)
    foreground = smooth > threshold_otsu(smooth)  # type: ignore[no-untyped-call]
    distance = gaussian_filter(distance_transform_edt(foreground).astype(np.float32), 1)
    min_distance = max(1, round(0.35 * diameter))
    peaks = peak_local_max(  # type: ignore[no-untyped-call]
        distance, min_distance=min_distance, labels=foreground.astype(np.int32), exclude_border=False
    )
    markers = np.zeros(image.shape, np.int32)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    return np.asarray(watershed(-distance, markers, mask=foreground))  # type: ignore[no-untyped-call]


def _count_shared_voxels(truth: Labels, labels: Labels) -> NDArray[np.int64]:
    """Count the voxels shared by each true object (rows) and found object (columns). Index 0 is the background."""
    indexed = []
    for volume in (truth, labels):
        values, inverse = np.unique(volume, return_inverse=True)
        indexed.append(inverse.ravel() + int(values[0] != 0))
    rows, columns = (int(np.max(indices)) + 1 for indices in indexed)
    counts = np.bincount(indexed[0] * columns + indexed[1], minlength=rows * columns)
    return counts.reshape(rows, columns)


def _f1(matches: int, objects: int) -> float:
    return 2 * matches / objects if objects else 1.0


def stack_name(image: Path) -> str:
    """Return the name of a stack for tables: the folder name if the file is `image.tif`, else the file name."""
    return image.parent.name if image.stem == "image" else image.stem


def resolve_diameter(text: str, truth: Labels, voxel_size: VoxelSize | None = None) -> DiameterSetting:
    """Parse a diameter setting, which may also be `mean` or `extents` of the true objects. Raises BadParameter.

    `mean` is the mean diameter of spheres with the volumes of the objects, scaled by the anisotropy of the voxels.
    `extents` is the median extent along each axis.
    """
    if text == "mean":
        anisotropy = 1.0 if voxel_size is None else voxel_size.anisotropy
        return Diameter((mean_diameter(truth) * anisotropy ** (1 / 3),), "px")
    if text == "extents":
        widths = median_extents(truth)
        z, y, x = (1.0, 1.0, 1.0) if widths is None else widths.tolist()
        return Diameter((z, y, x), "px")
    return parse_diameter(text)


class ScoreRow(NamedTuple):
    """A row of the table: the method, the object diameter that it used, and its scores."""

    method: str
    diameter: str
    scores: Scores


def score_model(runner: ModelRunner, image: Volume, truth: Labels, diameter: str | None) -> ScoreRow:
    """Segment and score a stack. `diameter` is parsed by `resolve_diameter` unless it is None.

    Raises the errors of `segment`.
    """
    request = Options(diameter=None if diameter is None else resolve_diameter(diameter, truth, image.voxel_size))
    result = segment(runner, image, request)
    diameter_used = "as sampled" if result.diameter_text is None else result.diameter_text.replace("; stated", "")
    return ScoreRow(runner.spec.identifier, diameter_used, score(truth, result.segmentation.pixels))


def score_classical(image: Volume, truth: Labels) -> ScoreRow:
    """Score the classical method on the first channel, with the true mean diameter."""
    diameter = mean_diameter(truth)
    return ScoreRow(
        "classical", str(Diameter((diameter,), "px")), score(truth, segment_classically(image.array()[0], diameter))
    )


def format_row(stack: str, line: ScoreRow) -> str:
    """Format a row of the table below `HEADER`."""
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in line.scores]
    return f"| {' | '.join([stack, line.method, line.diameter, *cells])} |"
