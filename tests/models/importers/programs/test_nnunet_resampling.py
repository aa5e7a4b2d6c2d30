"""Tests of how the resampling in the plans of nnU-Net is imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from importing import import_model
from paths import ROOT

from service.core.errors import MissingKeys
from service.models.importers.programs import nnunet

MODEL = ROOT / "tests" / "data" / "nnunet" / "Dataset002_Residual" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
NO_RESAMPLING, TORCH = "no_resampling_hack", "resample_torch_simple"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a model that may be modified."""
    return Path(shutil.copytree(MODEL, tmp_path / "Dataset002_Residual" / MODEL.name))


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of the configuration in the plans."""
    plans = json.loads((folder / "plans.json").read_text())
    plans["configurations"]["3d_fullres"] |= changes
    (folder / "plans.json").write_text(json.dumps(plans))


def test_stacks_are_not_resampled_if_the_plans_disable_it(folder: Path, tmp_path: Path) -> None:
    assert nnunet.read(folder).content["input"]["voxel_size"] is not None
    edit(folder, resampling_fn_data=NO_RESAMPLING, resampling_fn_probabilities=NO_RESAMPLING)
    spec, notes = import_model(folder, tmp_path / "models", {})
    assert spec.input.voxel_size is None
    assert "The plans disable resampling, so stacks are used at their original resolution." in notes
    assert not any("resampled linearly" in note for note in notes)


@pytest.mark.parametrize(("data", "probabilities"), [("mine", TORCH), (TORCH, NO_RESAMPLING), (TORCH, None)])
def test_unknown_resampling_must_be_replaced_by_the_operator(
    folder: Path, data: str, probabilities: str | None, tmp_path: Path
) -> None:
    edit(folder, resampling_fn_data=data, resampling_fn_probabilities=probabilities)
    with pytest.raises(MissingKeys, match=r"input\.voxel_size: .*resampling_fn_.* is not one of resample_data_or"):
        import_model(folder, tmp_path / "models", {})
    spec, notes = import_model(folder, tmp_path / "models", {"input": {"voxel_size": (1.0, 0.5, 0.5)}})
    assert (spec.input.voxel_size, spec.input.resampling) == ((1.0, 0.5, 0.5), "linear")
    assert any("resampled linearly" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "resampling"),
    [
        ({"order": 3, "order_z": 0, "force_separate_z": None}, "nnunet"),
        ({"force_separate_z": None}, "nnunet"),
        ({"order": 1, "order_z": 0, "force_separate_z": None}, "linear"),
        ({"order": 3, "order_z": 0, "force_separate_z": False}, "linear"),
        # Without this argument, nnU-Net's function interpolates along all axes, also if planes are far apart.
        ({"order": 3, "order_z": 0}, "linear"),
    ],
)
def test_resampling_depends_on_the_arguments_of_the_plans(
    folder: Path, arguments: dict[str, Any], resampling: str
) -> None:
    edit(folder, resampling_fn_data_kwargs=arguments)
    assert nnunet.read(folder).content["input"]["resampling"] == resampling
