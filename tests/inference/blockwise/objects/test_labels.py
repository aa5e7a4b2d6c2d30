"""Holes of a block-wise run: filled like those of the whole volume, however the volume is divided."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from service.inference.blockwise.layout import Layout, get_lengths, to_slices
from service.inference.blockwise.objects import labels as labels_module
from service.inference.blockwise.run_folder import BlockTask, RunFolder
from service.inference.decoding.filters.fill_holes import fill_holes

SHAPE = (17, 19, 20)


def make_labels(seed: int) -> np.ndarray:
    """Return three objects with many holes of different sizes, which touch each other and the faces."""
    rng = np.random.default_rng(seed)
    labels = 1 + (np.indices(SHAPE)[2] + rng.normal(0, 0.5, SHAPE) > 9) + (np.indices(SHAPE)[1] > 14)
    for sigma, fraction in ((1.2, 0.06), (0.4, 0.04)):
        noise = gaussian_filter(rng.normal(size=SHAPE), sigma)
        labels[noise < np.quantile(noise, fraction)] = 0
    return labels.astype(np.uint16)


@pytest.mark.parametrize("seed", range(3))
def test_holes_are_filled_as_in_the_whole_volume(seed: int, tmp_path: Path, monkeypatch) -> None:
    labels, numbers = make_labels(seed), np.array([0, 7, 0, 5])
    windows = [(3, 3, 3), (2, 6, 3), (6, 2, 2)][seed]
    layout = Layout(SHAPE, (3, 4, 4), 0.25, windows, 1)
    folder = RunFolder(tmp_path)
    for name in ("holes", "records"):
        (tmp_path / name).mkdir()
    run = SimpleNamespace(plan=SimpleNamespace(layout=layout, size=tuple(2 * n for n in SHAPE)), folder=folder)

    def read_tile(tile: int) -> np.ndarray:
        return labels[to_slices(layout.get_tile(tile))]

    monkeypatch.setattr(labels_module, "_read_piece_labels", lambda _run, _tile: None)
    monkeypatch.setattr(labels_module, "_label_pixels", lambda _run, tile, box, _labels: read_tile(tile)[box].copy())
    monkeypatch.setattr(
        labels_module, "_read_face_labels", lambda _run, tile, axis, side: read_tile(tile).take(-side, axis)
    )
    for tile in range(layout.total_groups):
        folder.write_record(BlockTask("", "holes", tile), labels_module.find_holes(run, tile))  # type: ignore[arg-type]
    objects, stack_voxels = labels_module._join_holes(run)  # type: ignore[arg-type]
    filled = labels.copy()
    fill_holes(filled)
    found = np.empty_like(labels)
    for tile in range(layout.total_groups):
        box = to_slices(layout.get_tile(tile))
        found[box] = numbers[labels[box]]
        depth, height, width = get_lengths(layout.get_tile(tile))
        for part in (slice(0, 1), slice(1, depth)):
            corner = (part, slice(height), slice(width))
            pixels = found[box][corner]
            pixels[...] = labels_module._fill_tile(run, tile, corner, pixels, numbers)  # type: ignore[arg-type]
    assert np.count_nonzero(filled != labels) > 100
    assert np.array_equal(found, numbers[filled])
    hole_voxels = np.bincount(objects, stack_voxels, 4)
    assert np.array_equal(hole_voxels, np.bincount(filled[labels == 0], minlength=4) * [0, 8, 8, 8])
