from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from scripts.recipes.tissues import label_cells, read_inr


@pytest.mark.parametrize(("dtype", "bits"), [("u1", 8), ("<u2", 16)])
def test_voxels_of_inrimage_files_are_in_z_y_x_order(tmp_path: Path, dtype: str, bits: int) -> None:
    voxels = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    header = f"#INRIMAGE-4#{{\nXDIM=4\nYDIM=3\nZDIM=2\nVDIM=1\nTYPE=unsigned fixed\nPIXSIZE={bits} bits\nCPU=decm\n"
    path = tmp_path / "stack.inr.gz"
    path.write_bytes(gzip.compress(header.ljust(252, "\n").encode() + b"##}\n" + voxels.tobytes()))
    np.testing.assert_array_equal(read_inr(path), voxels)


def test_cells_are_basins_of_their_markers() -> None:
    """Two cells and the background are separated by bright membranes at x = 7 and x = 14."""
    image, markers = np.zeros((5, 9, 21)), np.zeros((5, 9, 21), np.uint8)
    image[..., [7, 14]] = 100
    markers[2, 4, [3, 10, 18]] = 1
    cell_markers = markers.copy()
    cell_markers[..., 18] = 0
    labels = label_cells(image, markers, cell_markers)
    assert len(np.unique(labels[..., :7])) == len(np.unique(labels[..., 8:14])) == 1
    assert set(np.unique(labels)) == {0, 1, 2}
    assert not labels[..., 15:].any()
