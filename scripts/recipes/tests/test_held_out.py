from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from scripts.recipes.held_out import EMBRYO_VOXEL_SIZE, MIN_LATE_NUCLEI, Stack, find_embryos, report
from service.core.types import Volume


def labels(count: int) -> np.ndarray:
    """Return `count` labels, each of which is one row of voxels."""
    rows = np.arange(24)
    return np.broadcast_to(np.where(rows < count, rows + 1, 0)[:, None], (2, 24, 4)).astype(np.uint16)


def test_embryos_are_classified_by_their_number_of_nuclei(tmp_path: Path) -> None:
    for name, count in (("Emb1_t001", 2), ("Emb1_t051", MIN_LATE_NUCLEI), ("Emb1_t101", 0)):
        for part in ("Images/test/Images", "GroundTruth/test/GroundTruth_QCANet"):
            (tmp_path / part).mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(tmp_path / part / f"{name}.tif", labels(count))
    early, late = find_embryos(tmp_path)
    assert (early.kind, late.kind) == ("early", "late")
    assert np.array_equal(late.truth, labels(MIN_LATE_NUCLEI))
    assert late.volume.voxel_size == EMBRYO_VOXEL_SIZE


def test_folder_without_stacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Unpack"):
        next(find_embryos(tmp_path))


def test_table_has_means_with_and_without_voxel_size() -> None:
    image = labels(4).astype(np.float32)[None]
    stacks = [
        Stack("early", Volume.from_array(image, EMBRYO_VOXEL_SIZE), labels(4)),
        Stack("early", Volume.from_array(image, EMBRYO_VOXEL_SIZE), labels(2)),
        Stack("spots", Volume.from_array(image), labels(4)),
    ]
    lines = list(report(lambda volume: labels(4 if volume.voxel_size else 2), stacks))
    assert lines[1:] == ["| early | 2 | 0.833 | 0.833 |", "| spots | 1 | 0.667 | 0.667 |"]
