"""Sheets in an image, such as membranes and shells, told from blobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Share of voxels that belong to structures, how far their curvature along the other axes may be from none, and how
# steep they may be: at the step of a Gaussian edge the gradient is the curvature times the width of the smoothing, on
# the ridge of a sheet it is 0.
BRIGHTEST, LEAST_CURVED, STEEPEST = 0.05, 0.3, 0.7
# Smoothing by means of 27 voxels, so often: a standard deviation of 2 voxels.
SMOOTHINGS, SMOOTHED = 6, 2.0


def shows_sheets(windows: Sequence[Tensor]) -> bool | None:
    """Return whether what is bright in windows [z, y, x] of one channel lies on sheets: membranes or shells.

    It is mostly curved across one direction only, and a ridge there, not the edge of something bright. The eigenvalues
    of the Hessian tell sheets from lines and blobs (Sato et al. 1998). None where no window is large enough to tell.
    """
    flatness = np.array([_flatness(window) for window in windows if min(window.shape) >= 5]).reshape(-1, 3)
    if not len(flatness):
        return None
    # Where nothing is curved at all, it is not a number.
    flatness = flatness[np.isfinite(flatness).all(axis=1)]
    return bool(len(flatness) and (np.abs(np.median(flatness, axis=0)) < (LEAST_CURVED, LEAST_CURVED, STEEPEST)).all())


def _flatness(window: Tensor) -> tuple[float, float, float]:
    """Return how curved and steep a window is where its first eigenvalue is the most negative.

    These are medians of the middle and the last eigenvalue over the first, and of the gradient over the first and the
    width of the smoothing.
    """
    smooth = window.clamp(0, 1)[None]
    for _ in range(SMOOTHINGS):
        smooth = functional.avg_pool3d(smooth, 3, 1, 1, count_include_pad=False)
    gradient = torch.stack(torch.gradient(smooth[0]))
    hessian = torch.stack([torch.stack(torch.gradient(part)) for part in gradient])[:, :, 2:-2, 2:-2, 2:-2]
    matrices, slopes = hessian.flatten(2).permute(2, 0, 1), gradient[:, 2:-2, 2:-2, 2:-2].flatten(1).norm(dim=0)
    # Those with the most negative eigenvalue are among those with the most negative trace or the largest norm.
    count = max(int(BRIGHTEST * len(matrices)), 1)
    strong = matrices.square().sum((1, 2)).topk(min(4 * count, len(matrices))).indices
    values, slopes = torch.linalg.eigvalsh(matrices[strong]), slopes[strong]
    first = values[:, 0].topk(min(count, len(values)), largest=False).indices
    values, slopes = values[first], slopes[first]
    middle, last = (values[:, 1:] / values[:, :1]).median(0).values
    return float(middle), float(last), float((slopes / (-SMOOTHED * values[:, 0])).median())
