from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from scripts.recipes import embryos


def write_stack(folder: Path, name: str, labels: np.ndarray) -> None:
    for part, pixels in (("Images/train/Images", labels * 100), ("GroundTruth/train/GroundTruth_QCANet", labels)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(folder / part / f"{name}.tif", pixels.astype(np.uint16))


def test_stacks_are_copied_without_markers(tmp_path: Path) -> None:
    labels = np.zeros((8, 16, 16), np.uint8)
    labels[1:5, 2:8, 2:8], labels[6:8, 10:12, 10:12] = 1, 2
    for embryo in embryos.EMBRYOS:
        for time in embryos.TIME_POINTS:
            write_stack(tmp_path, f"Emb{embryo:02d}_t{time:03d}", labels)
    write_stack(tmp_path, "Emb02_t251", labels)
    embryos.main([str(tmp_path), str(tmp_path / "out")])
    written = sorted((tmp_path / "out").iterdir())
    assert len(written) == len(embryos.EMBRYOS) * len(embryos.TIME_POINTS) - 1
    assert not {folder.name for folder in written} & {"Emb02_t251", embryos.EXCLUDED_STACK}
    assert np.array_equal(tifffile.imread(written[0] / "mask.tif"), np.where(labels == 2, 0, labels))
    assert np.array_equal(tifffile.imread(written[0] / "image.tif"), labels.astype(np.uint16) * 100)


def test_nuclei_are_trimmed_to_their_bright_region() -> None:
    """The labels are larger than the nuclei. One nucleus has a dark cleft, the other one is in bright tissue."""
    z, y, x = np.indices((20, 30, 60))
    distances = [np.sqrt((z - 10) ** 2 + (y - 15) ** 2 + (x - center) ** 2) for center in (15, 45)]
    labels = np.select([distance <= 9 for distance in distances], [1, 2]).astype(np.uint16)
    image = np.where(distances[0] <= 6, 1000, 100) + np.where(x >= 30, 2000, 0) + np.where(distances[1] <= 6, 1000, 0)
    image[9:11, 15, 11:20] = 100
    trimmed = embryos.trim_to_bright_region(image, labels)
    for number, distance in enumerate(distances, 1):
        inside = trimmed == number
        assert inside[distance <= 5].all()
        assert not inside[distance > 7.5].any()


def test_missing_stack_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Emb01_t151"):
        embryos.main([str(tmp_path), str(tmp_path / "out")])
