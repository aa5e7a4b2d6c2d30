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


def test_stacks_are_copied_without_marks_of_nuclei_that_have_no_outline(tmp_path: Path) -> None:
    labels = np.zeros((8, 16, 16), np.uint8)
    labels[1:5, 2:8, 2:8], labels[6:8, 10:12, 10:12] = 1, 2
    for embryo in embryos.EMBRYOS:
        for time in embryos.TIMES:
            write_stack(tmp_path, f"Emb{embryo:02d}_t{time:03d}", labels)
    write_stack(tmp_path, "Emb02_t251", labels)
    embryos.main([str(tmp_path), str(tmp_path / "out")])
    made = sorted((tmp_path / "out").iterdir())
    assert len(made) == len(embryos.EMBRYOS) * len(embryos.TIMES) - 1
    assert not {folder.name for folder in made} & {"Emb02_t251", embryos.LEFT_OUT}
    assert np.array_equal(tifffile.imread(made[0] / "mask.tif"), np.where(labels == 2, 0, labels))
    assert np.array_equal(tifffile.imread(made[0] / "image.tif"), labels.astype(np.uint16) * 100)


def test_a_nucleus_ends_with_its_light() -> None:
    """Annotators drew wide outlines; a second nucleus is in bright tissue, and a cleft of chromatin stays inside."""
    z, y, x = np.indices((20, 30, 60))
    apart = [np.sqrt((z - 10) ** 2 + (y - 15) ** 2 + (x - middle) ** 2) for middle in (15, 45)]
    labels = np.select([distance <= 9 for distance in apart], [1, 2]).astype(np.uint16)
    image = np.where(apart[0] <= 6, 1000, 100) + np.where(x >= 30, 2000, 0) + np.where(apart[1] <= 6, 1000, 0)
    image[9:11, 15, 11:20] = 100
    ended = embryos.end_with_light(image, labels)
    for number, distance in enumerate(apart, 1):
        inside = ended == number
        assert inside[distance <= 5].all()
        assert not inside[distance > 7.5].any()


def test_missing_stacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Emb01_t151"):
        embryos.main([str(tmp_path), str(tmp_path / "out")])
