"""Tests of importing files of Cellpose. `scripts/fixtures/cellpose.py` has created the model with the original."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from importing import import_model
from paths import ROOT
from torch import Tensor

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.importers.programs import cellpose
from service.models.spec import ModelSpec

MODEL = ROOT / "tests" / "data" / "cellpose" / "CP_synthetic"
SAM_MODEL = MODEL.with_name("cpsam_synthetic")
FIRST = "downsample.down.res_down_0.conv.conv_0.2.weight"


def save(folder: Path, name: str = "CP_edited", model: Path = MODEL, **changes: Tensor | None) -> Path:
    """Save the tensors of a model with changes. None removes a tensor. `__` stands for a dot in a name."""
    tensors: dict[str, Any] = torch.load(model, weights_only=True)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    torch.save(tensors, folder / name)
    return folder / name


def test_file_without_suffix_is_recognized_and_described_completely():
    assert cellpose.is_supported(MODEL)
    draft = cellpose.read_file(MODEL)
    spec = ModelSpec(**{**draft.content, "name": "synthetic"}, weights={"sha256": "0" * 64}, folder=MODEL.parent)
    arguments = {"in_channels": 2, "features": [6, 12, 24, 48], "kernel_size": 3}
    assert spec.architecture.arguments == arguments
    assert (spec.input.channels, spec.input.diameter) == (1, 17)
    assert spec.input.default_diameter == "12.2734px"
    assert (spec.tiling.name, spec.input.roi_size, spec.decoding.kind) == ("cellpose", (4, 224, 224), "flows")
    assert any("--channels 2" in note for note in draft.notes)


def test_transformer_is_described_completely():
    content = cellpose.read_file(SAM_MODEL).content
    assert content["architecture"] == {
        "name": "CellposeSam",
        "arguments": {
            "patch_size": 8,
            "num_tokens": 32,
            "features": 48,
            "head_features": 16,
            "hidden_features": 192,
            "neck_features": 48,
            "table_lengths": [27, 127],
            "in_channels": 3,
        },
    }
    assert (content["input"]["default_diameter"], content["decoding"]["tiles"]) == ("30px", "fixed")


def test_files_of_other_programs_are_not_claimed(tmp_path):
    torch.save({"conv.weight": torch.zeros(2, 1, 3, 3, 3)}, tmp_path / "other.pth")
    (tmp_path / "text").write_text("downsample.down.res_down_0.conv.conv_0.2.weight")
    assert not any(map(cellpose.is_supported, (tmp_path / "other.pth", tmp_path / "text", tmp_path)))


def test_archive_with_damaged_compressed_member_is_not_claimed(tmp_path):
    path = tmp_path / "damaged"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("damaged/data.pkl", bytes(range(256)) * 100)
        start = archive.infolist()[0].header_offset + 30 + len("damaged/data.pkl")
    content = bytearray(path.read_bytes())
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    assert not cellpose.is_supported(path)


def test_model_of_omnipose_with_the_outputs_of_cellpose_is_refused_by_its_name(tmp_path):
    with pytest.raises(UnsupportedPackage, match=r"cyto_omni_nclasses_2 is a model of Omnipose.*rename the file"):
        cellpose.read_file(save(tmp_path, "cyto_omni_nclasses_2"))


def test_renamed_model_of_omnipose_is_refused(tmp_path):
    """Files of Cellpose from version 2 on contain diameters. Those of Cellpose 1 and Omnipose do not."""
    changes = dict.fromkeys(("diam_mean", "diam_labels"))
    for name in ("bacteria", "cyto3"):
        with pytest.raises(UnsupportedPackage, match=r"Cellpose 1 or Omnipose.*rename the file"):
            cellpose.read_file(save(tmp_path, name, **changes))
    cellpose.read_file(save(tmp_path, "cellpose_residual_on_bacteria", **changes))


def test_model_without_style_is_refused_by_its_name(tmp_path):
    name = "cellpose_residual_on_style_off_concatenation_off_train_2021_01_01"
    with pytest.raises(UnsupportedPackage, match=r"trained without a style.*rename the file"):
        cellpose.read_file(save(tmp_path, name))
    cellpose.read_file(save(tmp_path, name.replace("style_off", "style_on")))


def test_more_channels_than_those_of_the_network_are_refused(tmp_path):
    with pytest.raises(BrokenModel, match="the network has 2 channels, but the window has 3"):
        import_model(MODEL, tmp_path / "models", {"input": {"channels": 3}})


def test_missing_diameters_are_replaced_by_those_of_cellpose(tmp_path):
    for name, diameter in (("nucleitorch_0", 17.0), ("cyto2torch_0", 30.0)):
        content = cellpose.read_file(save(tmp_path, name, diam_mean=None, diam_labels=None)).content
        assert (content["input"]["diameter"], content["input"]["default_diameter"]) == (diameter, f"{diameter:g}px")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output__2__weight": torch.zeros(1, 6, 1, 1)}, "1 outputs.*Denoising"),
        ({"output__2__weight": torch.tensor(0.0)}, "0 outputs"),
        ({"output__2__weight": torch.zeros(4, 6, 1, 1)}, "a model of Omnipose"),
        ({FIRST.replace(".", "__"): torch.zeros(6, 2, 3, 3, 3)}, "3D convolutions"),
        ({FIRST.replace(".", "__"): None}, "network that is not supported"),
        ({"encoder__cls_token": torch.zeros(1)}, "Cellpose-DINO"),
        ({"encoder__pos_embed": torch.zeros(1)}, "looks like a model of Cellpose-SAM, but"),
        ({"diam_mean": torch.tensor([float("nan")])}, "diam_mean"),
        ({"diam_mean": torch.zeros(2**20)}, "diam_mean"),
        ({"diam_labels": torch.tensor([0.0])}, "diam_labels"),
    ],
)
def test_other_models_of_cellpose_are_refused_by_name(tmp_path, changes, message):
    path = save(tmp_path, **changes)
    assert cellpose.is_supported(path)
    with pytest.raises(UnsupportedPackage, match=message):
        cellpose.read_file(path)


def test_size_models_are_refused_by_name(tmp_path):
    np.save(tmp_path / "size_cyto3.npy", np.zeros(3))
    with pytest.raises(UnsupportedPackage, match="size model"):
        import_model(tmp_path / "size_cyto3.npy", tmp_path / "models", {})


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("The pickle was executed.",))


def test_pickled_objects_are_not_executed(tmp_path):
    torch.save({FIRST: Attack(), "diam_labels": torch.ones(1)}, tmp_path / "CP_attack", pickle_module=pickle)
    with pytest.raises(UnsupportedPackage, match="objects other than tensors"):
        import_model(tmp_path / "CP_attack", tmp_path / "models", {})


@pytest.mark.parametrize(
    "changes",
    [
        {"out__weight": None},
        {"encoder__pos_embed": torch.zeros(1).expand(1, 2**12, 2**12, 48)},
        {"encoder__pos_embed": torch.zeros(1, 32, 31, 48)},
        {"encoder__blocks__0__attn__rel_pos_h": torch.zeros(27, 0)},
        {"encoder__blocks__1__mlp__lin1__weight": torch.zeros(8, 48)},
        {"encoder__patch_embed__proj__weight": torch.zeros(48, 3, 8, 16)},
    ],
)
def test_inconsistent_transformers_are_refused(tmp_path, changes):
    with pytest.raises((BrokenModel, UnsupportedPackage), match=r"CellposeSam|Cellpose-SAM|take up more"):
        import_model(save(tmp_path, model=SAM_MODEL, **changes), tmp_path / "models", {})
    assert not (tmp_path / "models" / "cp_edited").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"output__0__weight": None},
        {FIRST.replace(".", "__"): torch.zeros(1).expand(2**12, 2**12, 3, 3)},
        {FIRST.replace(".", "__"): torch.zeros(6, 2, 4, 4)},
        {"upsample__up__res_up_3__proj__1__weight": torch.zeros(48, 48)},
        {"downsample__down__res_down_3__conv__conv_0__2__weight": torch.zeros(0, 24, 3, 3)},
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path, changes):
    with pytest.raises((BrokenModel, UnsupportedPackage), match=r"CellposeNet|take up more"):
        import_model(save(tmp_path, **changes), tmp_path / "models", {})
    assert not (tmp_path / "models" / "cp_edited").exists()
