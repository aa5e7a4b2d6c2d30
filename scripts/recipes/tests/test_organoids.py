from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile

from scripts.recipes import organoids
from scripts.recipes.sources import UNKNOWN_LABEL


def test_voxels_far_from_labeled_nuclei_are_unknown_unless_they_are_dark(tmp_path: Path) -> None:
    """A labeled nucleus and an unlabeled one lie in an organoid, with nothing around it."""
    image, labels = np.zeros((9, 40, 80), np.float32), np.zeros((9, 40, 80), np.uint16)
    image[:, 5:35, 5:75] = 10 + np.random.default_rng(0).random((9, 30, 70))
    labels[3:6, 12:28, 12:28] = 1
    image[labels > 0] = 100
    image[3:6, 12:28, 50:66] = 100
    for name in organoids.STACKS:
        (tmp_path / name).mkdir()
        tifffile.imwrite(tmp_path / name / "image.tif", image)
        tifffile.imwrite(tmp_path / name / "mask.tif", labels)
    organoids.main([str(tmp_path), str(tmp_path / "out")])
    complete, partial = (
        tifffile.imread(tmp_path / "out" / name / "mask.tif") == UNKNOWN_LABEL for name in organoids.STACKS[:2]
    )
    assert not complete.any()
    assert partial[3:6, 12:28, 50:66].all()
    assert not partial[labels > 0].any()
    assert not partial[1:8, 12:28, 12:28].any()
    assert not partial[3:6, 12:28, 9:31].any()
    assert not partial[image == 0].any()
    assert partial[0, 12:28, 12:28].mean() > 0.7
