"""Score a model of instances: `python -m service.training.evaluate --images a.tif b.tif --labels a_gt.tif b_gt.tif`.

Prints one Markdown table, the model beside a classical method that is told the diameter of the objects.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt, gaussian_filter
from skimage.feature import peak_local_max
from skimage.filters import threshold_otsu
from skimage.segmentation import watershed

from service.config import read_settings
from service.errors import BadParameter
from service.repository import read_spec
from service.segmenter import Segmenter
from service.training.train import read_pairs
from service.volume import Diameter, Options, Volume

Labels = NDArray[Any]

HEADER = (
    "| stack | method | true | found | F1 at IoU 0.5 | F1 at IoU 0.75 | mean IoU of matches | splits | merges |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Scores(NamedTuple):
    """How well labels agree with the truth.

    true, found    numbers of objects
    f1, f1_strict  2 TP / (true + found), a match being a pair whose intersection over union exceeds 0.5, or 0.75
    iou            mean intersection over union of the matches at 0.5; 0 without any
    splits         true objects that hold most of two or more found ones
    merges         found objects that hold most of two or more true ones
    """

    true: int
    found: int
    f1: float
    f1_strict: float
    iou: float
    splits: int
    merges: int


def score(truth: Labels, labels: Labels) -> Scores:
    """Compare two label volumes of one shape, 0 being background; the numbering does not matter.

    Above an intersection over union of 0.5 no object has two partners, so the matching is unique (Kirillov 2019).
    """
    shared = _overlaps(truth, labels)
    own, other = shared.sum(axis=1)[1:, None], shared.sum(axis=0)[None, 1:]
    inner = shared[1:, 1:]
    iou = inner / (own + other - inner)
    true, found = inner.shape
    matches = iou[iou > 0.5]
    return Scores(
        true=true,
        found=found,
        f1=_f1(len(matches), true + found),
        f1_strict=_f1(int(np.count_nonzero(iou > 0.75)), true + found),
        iou=float(matches.mean()) if len(matches) else 0.0,
        splits=int(np.count_nonzero((inner / other > 0.5).sum(axis=1) > 1)),
        merges=int(np.count_nonzero((inner / own > 0.5).sum(axis=0) > 1)),
    )


def classical(image: NDArray[Any], diameter: float) -> Labels:
    """Gaussian, Otsu's threshold, watershed of the distance transform from maxima that lie 0.35 diameters apart.

    Image and labels [Z, Y, X]; `diameter` in voxels.
    """
    smooth = gaussian_filter(image.astype(np.float32), 1)
    inside = smooth > threshold_otsu(smooth)  # type: ignore[no-untyped-call]
    distance = gaussian_filter(distance_transform_edt(inside).astype(np.float32), 1)
    apart = max(1, round(0.35 * diameter))
    peaks = peak_local_max(  # type: ignore[no-untyped-call]
        distance, min_distance=apart, labels=inside.astype(np.int32), exclude_border=False
    )
    markers = np.zeros(image.shape, np.int32)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    return np.asarray(watershed(-distance, markers, mask=inside))  # type: ignore[no-untyped-call]


def mean_diameter(truth: Labels) -> float:
    """Mean diameter in voxels of spheres of the objects' volumes."""
    volumes = np.unique(truth[truth > 0], return_counts=True)[1]
    return float(np.mean(np.cbrt(6 * volumes / np.pi))) if len(volumes) else 1.0


def _overlaps(truth: Labels, labels: Labels) -> NDArray[np.int64]:
    """Voxels that each true object (rows) shares with each found one (columns); row and column 0 are background."""
    numbered = []
    for volume in (truth, labels):
        values, inverse = np.unique(volume, return_inverse=True)
        numbered.append(inverse.ravel() + int(values[0] != 0))
    rows, columns = (int(numbers.max()) + 1 for numbers in numbered)
    counts = np.bincount(numbered[0] * columns + numbered[1], minlength=rows * columns)
    return counts.reshape(rows, columns)


def _f1(matches: int, objects: int) -> float:
    return 2 * matches / objects if objects else 1.0


def compare(
    segmenter: Segmenter, image: Volume, truth: Labels, request: Options, *, floor: bool = True
) -> dict[str, Scores]:
    """Scores of the model, and of the classical method beside it, by method; `image` has the channels of the model."""
    found = segmenter.segment(image, request).segmentation.pixels
    scores = {segmenter.spec.identifier: score(truth, found)}
    if floor:
        scores["classical"] = score(truth, classical(image.array()[0], mean_diameter(truth)))
    return scores


def row(stack: str, method: str, scores: Scores) -> str:
    """A line of the table below `HEADER`."""
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in scores]
    return f"| {' | '.join([stack, method, *cells])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    parser = argparse.ArgumentParser(prog="python -m service.training.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/nuclei"), help="model folder")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="stacks, one channel each")
    parser.add_argument("--labels", type=Path, nargs="+", required=True, help="their truths, in the same order")
    parser.add_argument("--diameters", nargs="*", default=[], help="as diameter= of a request, in the same order")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    settings = read_settings(None, {"STACKSEG_ENGINE__KIND": "eager", "STACKSEG_DEVICE__THREADS": str(options.threads)})
    segmenter = Segmenter(read_spec(options.model), settings)
    segmenter.warm_up()
    print(HEADER)
    if options.diameters and len(options.diameters) != len(options.images):
        raise BadParameter("Either every image needs a diameter, or none.")
    wanted = [Options(diameter=Diameter.parse(text)) for text in options.diameters] or [Options()] * len(options.images)
    pairs = read_pairs(options.images, options.labels)
    for path, request, (image, truth) in zip(options.images, wanted, pairs, strict=True):
        stack = path.parent.name if path.stem == "image" else path.stem
        for method, scores in compare(segmenter, Volume.from_array(image[None]), truth, request).items():
            print(row(stack, method, scores), flush=True)
            stack = ""


if __name__ == "__main__":
    main()
