from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from scripts.recipes import calibration_cases
from scripts.recipes.calibration_cases import Case, Folders, make_cases, read_embryo_cases, with_factor
from service.core.quantities import VoxelSize
from service.core.types import Volume

SOURCES = {"nuclei": "make_nuclei_stacks", "embryos": "make_nuclei_stacks", "membranes": "make_tissue_stacks"}


def make_stacks(count: int) -> Iterator[tuple[str, Volume, NDArray[Any]]]:
    truth = np.zeros((20, 20, 20), np.uint16)
    truth[5:15, 5:15, 5:15] = 1
    for _ in range(count):
        for kind in ("usual", "tissue", "noise"):
            yield kind, Volume.from_array(truth[None]), truth


@pytest.mark.parametrize("model", SOURCES)
def test_cases_cover_objects_of_the_model_other_objects_and_noise(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_cases, SOURCES[model], make_stacks)
    for name in ("NUM_FLAT_STACKS", "NUM_VARIED_TISSUE_STACKS", "NUM_FOREIGN_STACKS"):
        monkeypatch.setattr(calibration_cases, name, 1)
    cases = list(make_cases(model, Folders()))
    assert len({(case.stack, case.condition) for case in cases}) == len(cases)
    assert {case.group for case in cases if case.truth is None} == {"noise"}
    own = {"walls", "epithelium", "separate cells"} if model == "membranes" else {"flat"}
    assert {case.group for case in cases} == {"usual", "tissue", "noise", "foreign"} | own
    factors = {case.condition for case in cases if case.diameter is not None}
    assert factors == {"x0.6", "x0.77", "x1.3", "x1.7"}


def test_diameters_are_those_of_the_true_objects_but_not_too_small() -> None:
    (_, volume, truth), *_ = make_stacks(1)
    flat = Case("flat", "flat", "default", Volume.from_array(volume.read_all(), VoxelSize(3.375, 1, 1)), truth)
    sphere = (6 / np.pi) ** (1 / 3) * 10
    for case, factor, objects, expected in (
        (flat, 1.3, "nuclei", 1.5 * 1.3 * sphere),
        (flat._replace(volume=volume), 1.3, "nuclei", 1.3 * sphere),
        (flat._replace(volume=volume), 0.6, "cells", 16),
    ):
        diameter = with_factor(case, factor, objects).diameter
        assert diameter is not None
        assert diameter.lengths == pytest.approx((expected,), rel=0.02)


def test_stacks_of_an_embryo_are_left_out_together(tmp_path: Path) -> None:
    labels = np.arange(1, 28, dtype=np.uint16).reshape(3, 3, 3)
    folders = tmp_path / "Images/test/Images", tmp_path / "GroundTruth/test/GroundTruth_QCANet"
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("Emb1_t401", "Emb1_t451", "Emb1_t501", "Emb2_t401", "Emb2_t451"):
            tifffile.imwrite(folder / f"{name}.tif", labels)
    cases = [(case.stack, case.condition) for case in read_embryo_cases(tmp_path)]
    assert cases == [("Emb1", "late t401"), ("Emb1", "late t501"), ("Emb2", "late t451")]
