"""Detect sheets, such as membranes and shells, as opposed to blobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Fraction of the voxels that are assumed to belong to structures.
STRUCTURE_FRACTION = 0.05

# Maximum curvature of a sheet along its other two axes, relative to the curvature across the sheet.
MAX_CURVATURE_RATIO = 0.3

# Maximum gradient of a sheet, relative to the curvature times the smoothing sigma. This ratio is about 1 at the
# step of a Gaussian edge and 0 on the ridge of a sheet.
MAX_GRADIENT_RATIO = 0.7

# Maximum median of the absolute z component of the unit vectors across the sheets. If it is higher, the structures are
# blobs of few planes, which are strongly curved only along z.
MAX_Z_COMPONENT = 0.9

# Number of 3 x 3 x 3 mean filters. Together, they smooth like a Gaussian with this sigma.
SMOOTHING_PASSES = 6
SMOOTHING_SIGMA_VOXELS = 2.0


def contains_sheets(windows: Sequence[Tensor]) -> bool | None:
    """Return whether the bright structures in windows [z, y, x] of one channel are sheets: membranes or shells.

    A sheet is strongly curved in only one direction, and it is a ridge, not the edge of a bright region. The
    eigenvalues of the Hessian separate sheets from lines and blobs (Sato et al. 1998). Flat blobs
    in the image plane are not sheets. Returns None if no window is large enough.
    """
    ratios = np.array([_measure_structure_ratios(window) for window in windows if min(window.shape) >= 5]).reshape(
        -1, 4
    )
    if not len(ratios):
        return None
    # The ratios are NaN if a window is constant.
    ratios = ratios[np.isfinite(ratios).all(axis=1)]
    return bool(
        len(ratios)
        and (
            np.abs(np.median(ratios, axis=0))
            < (MAX_CURVATURE_RATIO, MAX_CURVATURE_RATIO, MAX_GRADIENT_RATIO, MAX_Z_COMPONENT)
        ).all()
    )


def _measure_structure_ratios(window: Tensor) -> tuple[float, float, float, float]:
    """Return the ratios and the z component of the voxels with the most negative first eigenvalues.

    The curvature ratios are the medians of the middle and of the last eigenvalue, divided by the first. The gradient
    ratio is the median of the gradient, divided by the first eigenvalue and the smoothing sigma. The z component is the
    median absolute z component of the first eigenvectors.
    """
    smoothed_window = window.clamp(0, 1)[None]
    for _ in range(SMOOTHING_PASSES):
        smoothed_window = functional.avg_pool3d(smoothed_window, 3, 1, 1, count_include_pad=False)
    gradient = torch.stack(torch.gradient(smoothed_window[0]))
    hessian = torch.stack([torch.stack(torch.gradient(part)) for part in gradient])[:, :, 2:-2, 2:-2, 2:-2]
    matrices, slopes = hessian.flatten(2).permute(2, 0, 1), gradient[:, 2:-2, 2:-2, 2:-2].flatten(1).norm(dim=0)
    # Computing eigenvalues is slow. The most negative eigenvalues occur where the norm of the Hessian is large.
    num_structure_voxels = max(int(STRUCTURE_FRACTION * len(matrices)), 1)
    candidates = matrices.square().sum((1, 2)).topk(min(4 * num_structure_voxels, len(matrices))).indices
    (eigenvalues, eigenvectors), slopes = torch.linalg.eigh(matrices[candidates]), slopes[candidates]
    structure_indices = eigenvalues[:, 0].topk(min(num_structure_voxels, len(eigenvalues)), largest=False).indices
    eigenvalues, slopes = eigenvalues[structure_indices], slopes[structure_indices]
    z_components = eigenvectors[structure_indices, 0, 0].abs()
    middle_ratio, last_ratio = (eigenvalues[:, 1:] / eigenvalues[:, :1]).median(0).values
    return (
        float(middle_ratio),
        float(last_ratio),
        float((slopes / (-SMOOTHING_SIGMA_VOXELS * eigenvalues[:, 0])).median()),
        float(z_components.median()),
    )
