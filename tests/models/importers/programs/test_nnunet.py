"""Tests of importing nnU-Net's folders. scripts/fixtures/nnunet.py made the models and the results of nnU-Net 2.8.1."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from importing import Trap, import_model
from live import eager_settings
from numpy.typing import NDArray
from paths import ROOT

from service.core.errors import BrokenModel, MissingKeys, UnsupportedPackage
from service.core.quantities import VoxelSize
from service.core.types import Options, OutputKind, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.loader import load_network
from service.models.spec import ModelSpec

DATA = ROOT / "tests" / "data" / "nnunet"
MODEL_FOLDER = "nnUNetTrainer__nnUNetPlans__3d_fullres"
PLAIN, RESIDUAL, REGIONS = "Dataset001_Plain", "Dataset002_Residual", "Dataset003_Regions"
# Micrometers per unit of the voxel sizes in the reference results.
UNITS = {PLAIN: 1.0, RESIDUAL: 1.0, REGIONS: 1000.0}
CHECKPOINT = "fold_0/checkpoint_final.pth"


def run(runner: ModelRunner, volume: Volume, output: OutputKind) -> NDArray[Any]:
    return segment(runner, volume, Options(output=output, quality="best")).segmentation.pixels


def compute_lowest_iou(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the lowest intersection over union of a class."""
    masks = [(actual == value, expected == value) for value in np.unique(expected)]
    return float(min((a & b).sum() / (a | b).sum() for a, b in masks))


@pytest.mark.parametrize("name", [PLAIN, RESIDUAL, REGIONS])
def test_imported_model_gives_the_results_of_nnunet(name: str, tmp_path: Path) -> None:
    overrides = {"input": {"voxel_size": [1, 1, 1]}} if name == PLAIN else {}
    spec, _ = import_model(DATA / name, tmp_path, overrides)
    runner = ModelRunner(spec, eager_settings(tmp_path))
    runner.warm_up()
    with np.load(DATA / name / "reference.npz") as reference:
        volumes = [
            Volume.from_array(reference["image"], VoxelSize(*(UNITS[name] * reference[key]).tolist()))
            for key in ("spacing", "resampled_spacing")
        ]
        probabilities = run(runner, volumes[0], "probabilities")
        assert np.abs(probabilities - reference["probabilities"] / 65535).max() < 1e-4
        assert compute_lowest_iou(run(runner, volumes[0], "classes"), reference["labels"]) > 0.99
        assert compute_lowest_iou(run(runner, volumes[1], "classes"), reference["resampled_labels"]) > 0.99


def test_settings_are_converted_to_the_axes_of_the_images(tmp_path: Path) -> None:
    spec, notes = import_model(DATA / RESIDUAL, tmp_path, {})
    assert spec.input.voxel_size == (0.5, 0.25, 0.8)
    assert (spec.input.roi_size, spec.input.roi_multiple) == ((16, 28, 10), (4, 2, 2))
    assert [spec.input.get_normalization(index).kind for index in range(2)] == ["range", "percentile"]
    assert spec.outputs == ("background", "dim", "bright")
    assert any("was read as micrometers" in note for note in notes)
    assert any("fold_0/checkpoint_final.pth, fold_1/checkpoint_final.pth" in note for note in notes)


def test_unit_of_the_spacing_depends_on_the_file_format(tmp_path: Path) -> None:
    spec, notes = import_model(DATA / REGIONS, tmp_path, {})
    assert spec.input.voxel_size == (2.0, 1.0, 1.0)
    assert any("was read as millimeters" in note and "--voxel-size" in note for note in notes)
    spec, notes = import_model(DATA / PLAIN, tmp_path, {})
    assert spec.input.voxel_size is None
    assert any("seems to be unknown" in note for note in notes)


def copy_model(name: str, target: Path) -> Path:
    """Copy a model to `target`, and return its folder with the plans."""
    return Path(shutil.copytree(DATA / name / MODEL_FOLDER, target / name / MODEL_FOLDER))


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_checkpoint(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    checkpoint = torch.load(folder / CHECKPOINT, weights_only=False)
    edit(checkpoint)
    torch.save(checkpoint, folder / CHECKPOINT)


def test_results_folders_and_exported_archives_are_recognized(tmp_path: Path) -> None:
    folder = copy_model(PLAIN, tmp_path / "results")
    with zipfile.ZipFile(tmp_path / "exported.zip", "w") as archive:
        for path in folder.rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path / "results"))
    for number, path in enumerate((folder, folder.parent, tmp_path / "results", tmp_path / "exported.zip")):
        spec, _ = import_model(path, tmp_path / "models", {}, name=f"plain-{number}")
        assert spec.network_name == "PlainConvUNet"


def test_full_resolution_is_preferred_and_folds_without_final_checkpoint_are_ignored(tmp_path: Path) -> None:
    folder = copy_model(RESIDUAL, tmp_path)
    shutil.copytree(folder, folder.with_name("nnUNetTrainer__nnUNetPlans__2d"))
    (folder / "fold_1" / "checkpoint_final.pth").rename(folder / "fold_1" / "checkpoint_best.pth")
    spec, notes = import_model(tmp_path, tmp_path / "models", {})
    assert spec.architecture is not None
    assert spec.architecture.arguments["num_folds"] == 1
    assert any("fold_1" in note and "ignored" in note for note in notes)
    assert any("nnUNetPlans__2d" in note for note in notes)
    shutil.copytree(folder, folder.with_name("nnUNetTrainer__otherPlans__3d_fullres"))
    with pytest.raises(UnsupportedPackage, match=r"several models.*nnUNetTrainer__otherPlans__3d_fullres"):
        import_model(tmp_path, tmp_path / "models", {})


def test_fold_of_all_data_is_ignored_if_there_are_others(tmp_path: Path) -> None:
    folder = copy_model(RESIDUAL, tmp_path)
    shutil.copytree(folder / "fold_0", folder / "fold_all")
    _, notes = import_model(folder, tmp_path / "models", {})
    assert any("and fold_all if there are others, were ignored: fold_all" in note for note in notes)


def test_window_of_an_ensemble_gets_the_mean_of_the_scores_of_the_folds(tmp_path: Path) -> None:
    ensemble = load_network(import_model(DATA / RESIDUAL, tmp_path / "models", {}).spec)
    folder, networks = copy_model(RESIDUAL, tmp_path), []
    for number, other in ((0, 1), (1, 0)):
        shutil.rmtree(folder / f"fold_{other}")
        networks.append(load_network(import_model(folder, tmp_path / "models", {}, name=f"fold-{number}").spec))
        shutil.copytree(DATA / RESIDUAL / MODEL_FOLDER / f"fold_{other}", folder / f"fold_{other}")
    window = torch.randn(1, 2, 16, 28, 10, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = (networks[0](window) + networks[1](window)) / 2
        torch.testing.assert_close(ensemble(window), expected)
        assert not torch.allclose(networks[0](window), expected, atol=1e-2)


def get_configuration(plans: Any) -> Any:
    return plans["configurations"]["3d_fullres"]


def set_argument(key: str, value: Any) -> Callable[[Any], None]:
    return lambda plans: get_configuration(plans)["architecture"]["arch_kwargs"].update({key: value})


def set_key(key: str, value: Any) -> Callable[[Any], None]:
    return lambda plans: get_configuration(plans).update({key: value})


INVALID_PLANS: dict[str, tuple[Callable[[Any], object], str]] = {
    "2D": (set_key("patch_size", [24, 32]), "is a 2D network"),
    "cascade": (set_key("previous_stage", "3d_lowres"), "second stage of a cascade"),
    "huge window": (set_key("patch_size", [4096, 4096, 4096]), "more than 33554432 voxels"),
    "long window": (set_key("patch_size", [10**9, 1, 1]), "integers from 1 to 4096"),
    "odd window": (set_key("patch_size", [8, 24, 33]), "not a multiple of the strides"),
    "other preprocessor": (set_key("preprocessor_name", "Mine"), "only DefaultPreprocessor"),
    "circular": (set_key("inherits_from", "3d_fullres"), "inherits from itself"),
    "no parent": (set_key("inherits_from", "missing"), "configurations.missing: it is missing"),
    "spacing": (set_key("spacing", [1, 1, -1]), "three positive numbers"),
    "transposition": (lambda plans: plans.update(transpose_forward=[0, 0, 2]), "permutation of 0, 1, 2"),
    "inverse": (
        lambda plans: plans.update(transpose_forward=[2, 0, 1], transpose_backward=[2, 0, 1]),
        r"transpose_backward: expected \[1, 2, 0\]",
    ),
    "stride": (set_argument("strides", [[10**9, 1, 1], [2, 2, 2], [1, 2, 2]]), r"strides: .*from 1 to 64"),
    "strides": (set_argument("strides", [[64, 64, 64]] * 3), "not a multiple of the strides"),
    "features": (set_argument("features_per_stage", [10**12] * 3), "features_per_stage: .*1 to 16384"),
    "wide": (set_argument("features_per_stage", [16384] * 3), "weights do not fit PlainConvUNet"),
    "stages": (set_argument("features_per_stage", [1] * 1000), "2 to 16 stages"),
    "blocks": (set_argument("n_conv_per_stage", [2, 2]), "n_conv_per_stage: expected 3 integers"),
    "extra argument": (set_argument("nonlin_first", True), "nonlin_first: this argument is not supported"),
    "device": (set_argument("norm_op_kwargs", {"device": "cuda"}), "norm_op_kwargs.device: this argument"),
    "norm": (set_argument("norm_op", "os.system"), "'system' is not one of InstanceNorm3d"),
    "network": (
        lambda plans: get_configuration(plans)["architecture"].update(network_class_name="os.path.join"),
        "'join' is not one of PlainConvUNet, ResidualEncoderUNet",
    ),
    "no configurations": (lambda plans: plans.update(configurations=None), "it is missing"),
    "list": (lambda plans: plans.update(configurations={"3d_fullres": []}), "expected"),
}


@pytest.mark.parametrize("case", INVALID_PLANS)
def test_plans_that_cannot_be_reproduced_are_rejected(case: str, tmp_path: Path) -> None:
    edit, message = INVALID_PLANS[case]
    folder = copy_model(PLAIN, tmp_path)
    edit_json(folder / "plans.json", edit)
    with pytest.raises((UnsupportedPackage, BrokenModel), match=message):
        import_model(folder, tmp_path / "models", {})
    assert not list((tmp_path / "models").glob("*"))


INVALID_DATASETS: dict[str, tuple[Callable[[Any], object], str]] = {
    "gap": (lambda dataset: dataset.update(labels={"background": 0, "a": 2}), "integers 0 to 1"),
    "no background": (lambda dataset: dataset.update(labels={"a": 1}), "background with 0"),
    "text": (lambda dataset: dataset.update(labels={"background": 0, "a": "1"}), "integers of the labels"),
    "regions": (lambda dataset: dataset.update(labels={"background": 0, "a": [1, 2]}), "regions_class_order"),
    "channels": (lambda dataset: dataset.update(channel_names={"a": "b"}), "expected the keys 0 to 0"),
    "no channels": (lambda dataset: dataset.pop("channel_names"), "found 0 channels"),
    "more outputs": (lambda dataset: dataset["labels"].update(extra=3), "weights do not fit"),
}


@pytest.mark.parametrize("case", INVALID_DATASETS)
def test_inconsistent_datasets_are_rejected(case: str, tmp_path: Path) -> None:
    edit, message = INVALID_DATASETS[case]
    folder = copy_model(PLAIN, tmp_path)
    edit_json(folder / "dataset.json", edit)
    with pytest.raises((UnsupportedPackage, BrokenModel), match=message):
        import_model(folder, tmp_path / "models", {})


def test_operator_can_replace_a_normalization_that_is_not_supported(tmp_path: Path) -> None:
    folder = copy_model(PLAIN, tmp_path)
    edit_json(folder / "plans.json", set_key("use_mask_for_norm", [True]))
    with pytest.raises(MissingKeys, match=r"input\.normalisation"):
        import_model(folder, tmp_path / "models", {})
    spec, notes = import_model(folder, tmp_path / "models", {"input": {"normalisation": {"kind": "zscore"}}})
    assert spec.input.normalisation.kind == "zscore"
    assert any("background of zeros" in note for note in notes)


def change_encoder_alias(checkpoint: dict[str, Any]) -> None:
    weights = checkpoint["network_weights"]
    name = next(name for name in weights if name.startswith("decoder.encoder."))
    weights[name] = weights[name] + 1


INVALID_CHECKPOINTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing tensor": (
        lambda checkpoint: checkpoint["network_weights"].pop("decoder.transpconvs.0.weight"),
        r"1 tensor is missing \(decoder\.transpconvs\.0\.weight\)",
    ),
    "other tensor": (
        lambda checkpoint: checkpoint["network_weights"].update(gate=torch.ones(1)),
        r"1 tensor is not in the network \(gate\)",
    ),
    "contradiction": (change_encoder_alias, "differs from the tensor of the encoder"),
    "no weights": (lambda checkpoint: checkpoint.pop("network_weights"), "network_weights is missing"),
    "not tensors": (lambda checkpoint: checkpoint.update(network_weights={"a": 1}), "does not contain the tensors"),
    "repeated": (
        lambda checkpoint: checkpoint.update(network_weights={"a": torch.ones(1).expand(2**40)}),
        "more than 8589934592 bytes",
    ),
    "mirroring": (lambda checkpoint: checkpoint.update(inference_allowed_mirroring_axes=(7,)), "expected axes"),
    "no configuration": (lambda checkpoint: checkpoint.pop("init_args"), "init_args.configuration: expected a string"),
    "other configuration": (lambda checkpoint: checkpoint["init_args"].update(configuration="2d"), "configurations.2d"),
}


@pytest.mark.parametrize("case", INVALID_CHECKPOINTS)
def test_invalid_checkpoints_are_rejected(case: str, tmp_path: Path) -> None:
    edit, message = INVALID_CHECKPOINTS[case]
    folder = copy_model(PLAIN, tmp_path)
    edit_checkpoint(folder, edit)
    with pytest.raises((UnsupportedPackage, BrokenModel), match=message):
        import_model(folder, tmp_path / "models", {})


def test_numpy_values_in_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    folder = copy_model(PLAIN, tmp_path)
    logging = {"ema_fg_dice": [np.float64(0.5), np.float32(0.5)], "counts": np.arange(3)}
    edit_checkpoint(folder, lambda checkpoint: checkpoint.update(logging=logging, _best_ema=np.float64(0.5)))
    assert import_model(folder, tmp_path / "models", {}).spec.network_name == "PlainConvUNet"


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder, trap = copy_model(PLAIN, tmp_path), tmp_path / "trapped"
    edit_checkpoint(folder, lambda checkpoint: checkpoint.update(logging=Trap(trap)))
    with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors: it contains objects"):
        import_model(folder, tmp_path / "models", {})
    assert not trap.exists()


def test_links_to_files_outside_the_package_are_rejected(tmp_path: Path) -> None:
    folder = copy_model(PLAIN, tmp_path / "package")
    for name in ("plans.json", CHECKPOINT):
        shutil.move(folder / name, tmp_path / "outside")
        (folder / name).symlink_to(tmp_path / "outside")
        with pytest.raises(UnsupportedPackage, match=r"is not a file inside the package"):
            import_model(folder, tmp_path / "models", {})
        (folder / name).unlink()
        shutil.move(tmp_path / "outside", folder / name)


def test_windows_are_mirrored_only_along_the_axes_of_the_checkpoint(tmp_path: Path) -> None:
    folder = copy_model(RESIDUAL, tmp_path)
    shutil.rmtree(folder / "fold_1")

    def find_axes(axes: Any, name: str) -> ModelSpec:
        edit_checkpoint(folder, lambda checkpoint: checkpoint.update(inference_allowed_mirroring_axes=axes))
        return import_model(folder, tmp_path / "models", {}, name=name).spec

    # The first axis of the network is x, as `transpose_forward` is [2, 0, 1].
    assert find_axes((0, 1), "two").input.mirror_axes == ("z", "x")
    assert find_axes(None, "none").input.mirror_axes == ()


def test_networks_run_in_bfloat16(tmp_path: Path) -> None:
    network = load_network(import_model(DATA / RESIDUAL, tmp_path, {}).spec).to(torch.bfloat16)
    with torch.inference_mode():
        assert network(torch.zeros(1, 2, 16, 28, 10, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("folder", [".", "nnUNetTrainerV2__nnUNetPlansv2.1", "nnUNet/3d_fullres/Task001_Cells/A__B"])
def test_model_of_nnunet_1_is_refused_by_name(folder: str, tmp_path: Path) -> None:
    fold = tmp_path / "results" / folder / "fold_0"
    fold.mkdir(parents=True)
    (fold.parent / "plans.pkl").write_bytes(b"\x80\x04.")
    (fold / "model_final_checkpoint.model").write_bytes(b"PK")

    with pytest.raises(UnsupportedPackage, match=r"nnU-Net 1 \(plans.pkl\).*Train the model again with nnU-Net 2"):
        import_model(tmp_path / "results", tmp_path / "models", {})
