"""Tests of importing MONAI bundles, as written by `monai.bundle`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from importing import import_model, segment_volume
from monai.bundle import init_bundle
from torch import nn

from service.core.errors import UnsupportedPackage
from service.core.quantities import VoxelSize
from service.core.types import Volume
from service.models.importers.import_model import ImportResult

METADATA: dict[str, Any] = {
    "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
    "version": "0.2.1",
    "monai_version": "1.6.1",
    "name": "Three Bands",
    "description": "Bands of brightness.",
    "copyright": "CC0",
    "network_data_format": {
        "inputs": {"image": {"type": "image", "num_channels": 1, "spatial_shape": [32, 32, 32], "dtype": "float32"}},
        "outputs": {
            "pred": {
                "num_channels": 3,
                "channel_def": {"0": "background", "1": "dim", "2": "bright"},
                "dtype": "float32",
            }
        },
    },
}

INFERENCE: dict[str, Any] = {
    "imports": ["$import glob"],
    "bundle_root": ".",
    "device": "$torch.device('cpu')",
    "window": [16, 32, 32],
    "outputs": 3,
    "network_def": {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": "@outputs",
        "channels": [8, 16],
        "strides": [2],
        "norm": "BATCH",
        "act": "RELU",
    },
    "network": "$@network_def.to(@device)",
    "preprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "image"},
            {"_target_": "EnsureChannelFirstd", "keys": "image"},
            {"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": 0, "a_max": 2800, "b_min": 0, "b_max": 1},
        ],
    },
    "inferer": {"_target_": "SlidingWindowInferer", "roi_size": "@window", "sw_batch_size": 1},
    "postprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "Activationsd", "keys": "pred", "softmax": True},
            {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
        ],
    },
}


def make_config(**overrides: Any) -> dict[str, Any]:
    """Return INFERENCE with some keys replaced."""
    return {**INFERENCE, **overrides}


def make_preprocessing_config(*steps: dict[str, Any]) -> dict[str, Any]:
    """Return INFERENCE with different preprocessing steps."""
    return make_config(preprocessing={"_target_": "Compose", "transforms": list(steps)})


def make_metadata(side: str, name: str, **overrides: Any) -> dict[str, Any]:
    """Return METADATA with some keys of an input or output replaced."""
    metadata = copy.deepcopy(METADATA)
    tensor = metadata["network_data_format"][side][name]
    tensor |= overrides
    return metadata


BundleWriter = Callable[..., Path]


@pytest.fixture
def write(bands_network: nn.Module, tmp_path: Path) -> BundleWriter:
    """Return a function (inference, metadata) that writes a bundle with the weights of `bands`."""

    def write_bundle(inference: dict[str, Any] = INFERENCE, metadata: dict[str, Any] = METADATA) -> Path:
        folder = tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}"
        init_bundle(folder, network=bands_network, metadata_str=metadata, inference_str=inference)
        return folder

    return write_bundle


@pytest.fixture
def import_bundle(write: BundleWriter, tmp_path: Path) -> Callable[..., ImportResult]:
    """Return a function (inference, **overrides of the model file) that writes and imports a bundle."""
    return lambda inference, **overrides: import_model(write(inference), tmp_path / "models", overrides)


def test_bundle_is_imported_and_segments(write: BundleWriter, tmp_path: Path, phantom: Any) -> None:
    bundle = write(metadata=METADATA | {"description": "Bands\r\nof \x1b[31mbrightness."})
    spec, notes = import_model(bundle, tmp_path / "models", {})
    assert spec.summary == "Bands\nof [31mbrightness."
    assert (spec.identifier, spec.licence, spec.activation) == ("three-bands/0.2.1", "CC0", "softmax")
    assert (spec.outputs, spec.input.roi_size) == (("background", "dim", "bright"), (16, 32, 32))
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["three-bands"]
    result = segment_volume(spec, Volume.from_array(phantom.image[None])).segmentation
    assert np.mean(result.pixels == phantom.classes) > 0.97
    assert any("Z, Y, X" in note for note in notes)


def test_bundle_with_torchscript_and_yaml_is_imported(
    bands_network: nn.Module, write: BundleWriter, tmp_path: Path
) -> None:
    bundle = write()
    (bundle / "configs" / "inference.json").unlink()
    (bundle / "configs" / "inference.yaml").write_text(yaml.safe_dump(INFERENCE))
    (bundle / "models" / "model.pt").unlink()
    torch.jit.script(bands_network).save(str(bundle / "models" / "model.ts"))
    spec = import_model(bundle, tmp_path / "models", {}, "scripted", trust=True).spec
    assert (spec.name, spec.architecture, spec.weights.kind) == ("scripted", None, "torchscript")


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        (
            "ScaleIntensityRanged",
            {"a_min": 100, "a_max": 300, "b_min": -1, "b_max": 1, "clip": True},
            {"kind": "range", "low": 200.0, "high": 300.0, "clip": (-1.0, 1.0)},
        ),
        (
            "monai.transforms.ScaleIntensityRangePercentilesd",
            {"lower": 1, "upper": 99, "b_min": 0, "b_max": 1},
            {"kind": "percentile", "low": 1.0, "high": 99.0, "eps": 0.0, "clip": None},
        ),
        ("NormalizeIntensityd", {"channel_wise": True}, {"kind": "zscore", "eps": 0.0}),
        (
            "NormalizeIntensityd",
            {"subtrahend": 10, "divisor": 4},
            {"kind": "range", "low": 10.0, "high": 14.0, "clip": None},
        ),
    ],
)
def test_supported_normalizations_are_translated(
    import_bundle: Callable[..., ImportResult], name: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = import_bundle(make_preprocessing_config({"_target_": name, **arguments})).spec
    assert spec.input.normalisation.model_dump() == expected


@pytest.mark.parametrize(
    ("inference", "field"),
    [
        (
            make_preprocessing_config({"_target_": "Orientationd", "axcodes": "RAS"}),
            r"preprocessing.transforms\[0\]._target_: Orientationd",
        ),
        (
            make_preprocessing_config({"_target_": "NormalizeIntensityd", "nonzero": True}),
            r"preprocessing.transforms\[0\].nonzero",
        ),
        (make_preprocessing_config({"_target_": "NormalizeIntensityd", "subtrahend": 9}), "0\\].subtrahend: .*both"),
        (make_preprocessing_config({"_target_": "NormalizeIntensityd", "divisor": 9}), "0\\].subtrahend: .*both"),
        (
            make_preprocessing_config({"_target_": "ScaleIntensityd", "dtype": "uint8"}),
            r"0\].dtype: only the types float32 and float64 are supported, not 'uint8'",
        ),
        (
            make_preprocessing_config({"_target_": "ScaleIntensityd", "gamma": 2}),
            r"0\].gamma: this argument of ScaleIntensityd is not supported",
        ),
        (
            make_config(postprocessing={"transforms": [{"_target_": "Activationsd", "other": "torch.tanh"}]}),
            r"0\].other: this argument of Activationsd is not supported",
        ),
        (
            make_config(postprocessing={"transforms": [{"_target_": "Activationsd", "sigmoid": 1, "softmax": 1}]}),
            r"0\].softmax: sigmoid and softmax cannot be applied together",
        ),
        (
            make_config(
                postprocessing={
                    "transforms": [
                        {"_target_": "AsDiscreted", "argmax": True},
                        {"_target_": "Activationsd", "softmax": True},
                    ]
                }
            ),
            r"1\]._target_: Activationsd is not supported with these settings",
        ),
        (
            make_preprocessing_config({"_target_": "ScaleIntensityRanged", "a_min": "$2 + 3", "a_max": 9}),
            r"transforms\[0\].a_min: '\$2 \+ 3'",
        ),
        (make_config(network_def={"_target_": "scripts.net.Mine"}), "network_def._target_: 'scripts.net.Mine'"),
        (make_config(network_def=INFERENCE["network_def"] | {"channels": "$[8, 16]"}), "network_def.channels"),
        (make_config(window="@nowhere"), "inferer.roi_size|spatial_shape"),
        (make_config(a="@b", b="@a"), "circular"),
        (
            make_config(a0="laugh" * 100, **{f"a{n}": [f"@a{n - 1}"] * 9 for n in range(1, 14)}),
            "references expand to more than",
        ),
        (make_config(network_def={"_target_": "monai.networks.nets.os.system"}), "network_def._target_"),
        (
            make_config(network_def={"_target_": "UNet", "_requires_": "$__import__('os')", "channels": "$7"}),
            "channels: '.7'",
        ),
        (make_config(network_def=[]), "architecture: network: expected a mapping"),
        (make_config(inferer=["roi_size"]), "inferer"),
        (
            make_config(postprocessing={"transforms": [{"_target_": "Lambdad", "func": "$print"}]}),
            r"postprocessing.transforms\[0\]",
        ),
    ],
)
def test_unsupported_settings_are_rejected_with_the_field(
    write: BundleWriter, tmp_path: Path, inference: dict[str, Any], field: str
) -> None:
    bundle = write(inference, make_metadata("inputs", "image", spatial_shape=None))
    with pytest.raises(UnsupportedPackage, match=field):
        import_model(bundle, tmp_path / "models", {})
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("channels", [0, 10**9, "3", None])
def test_invalid_number_of_channels_is_rejected(write: BundleWriter, tmp_path: Path, channels: Any) -> None:
    with pytest.raises(UnsupportedPackage, match="num_channels"):
        import_model(write(metadata=make_metadata("outputs", "pred", num_channels=channels)), tmp_path / "models", {})


@pytest.mark.parametrize("name", ["configs/metadata.json", "configs/inference.json", "models/model.pt"])
def test_links_to_files_outside_the_bundle_are_not_followed(write: BundleWriter, tmp_path: Path, name: str) -> None:
    bundle = write()
    (bundle / name).rename(tmp_path / "outside")
    (bundle / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsupportedPackage, match=f"{name} is not a file inside the package"):
        import_model(bundle, tmp_path / "models", {})


RANGE = {"_target_": "ScaleIntensityRanged", "a_min": 0, "a_max": 2800, "b_min": 0, "b_max": 1}


@pytest.mark.parametrize(
    ("pixdim", "expected"),
    [
        ([1.5, 0.5, 0.25], (1.5, 0.5, 0.25)),
        (0.5, (0.5, 0.5, 0.5)),
        ([2, 1], (2.0, 1.0, 1.0)),
        ("@size", (4.0, 1.0, 1.0)),
    ],
)
def test_spacing_becomes_the_voxel_size_of_the_model(
    import_bundle: Callable[..., ImportResult], pixdim: Any, expected: tuple[float, ...]
) -> None:
    step = {"_target_": "Spacingd", "keys": ["image", "label"], "pixdim": pixdim, "mode": ["bilinear", "nearest"]}
    spec, notes = import_bundle(make_preprocessing_config(step, RANGE) | {"size": [4, 1, 1]})
    assert spec.input.voxel_size == expected
    assert spec.input.normalisation.kind == "range"
    assert any("Spacingd" in note and "um along Z, Y, X" in note for note in notes)
    volume = Volume.from_array(np.zeros((1, 8, 16, 16), np.uint16), VoxelSize(1.0, 1.0, 1.0))
    assert any("to match the model's voxel size" in note for note in segment_volume(spec, volume).notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"pixdim": [1.0, -1.0, 1.0]},
        {"pixdim": "$[1, 1, 1]"},
        {"pixdim": [1.0, 1.0, 1.0], "mode": "nearest"},
        {"pixdim": [1.0, 1.0, 1.0], "max_pixdim": [2.0, 2.0, 2.0]},
        {},
    ],
)
def test_unsupported_spacing_is_rejected_unless_overridden(
    import_bundle: Callable[..., ImportResult], settings: dict[str, Any]
) -> None:
    inference = make_preprocessing_config({"_target_": "Spacingd", **settings}, RANGE)
    with pytest.raises(UnsupportedPackage, match=r"input\.voxel_size: preprocessing\.transforms\[0\]"):
        import_bundle(inference, input={"normalisation": {"kind": "zscore"}})
    spec, notes = import_bundle(inference, input={"voxel_size": None})
    assert spec.input.voxel_size is None
    assert any("Your value of input.voxel_size" in note and "transforms[0]" in note for note in notes)


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("is_resampled_first", [False, True])
def test_normalization_after_resampling_is_noted_if_the_order_matters(
    import_bundle: Callable[..., ImportResult], is_clipped: bool, is_resampled_first: bool
) -> None:
    steps = [{"_target_": "Spacingd", "pixdim": 1}, {**RANGE, "clip": is_clipped}]
    notes = import_bundle(make_preprocessing_config(*steps[:: 1 if is_resampled_first else -1])).notes
    has_note = any("applies ScaleIntensityRanged after Spacingd, and StackSeg before it" in note for note in notes)
    assert has_note is (is_clipped and is_resampled_first)


def test_single_number_is_the_window_size_along_all_axes(import_bundle: Callable[..., ImportResult]) -> None:
    inferer = {"_target_": "SlidingWindowInferer", "roi_size": 16}
    assert import_bundle(make_config(inferer=inferer)).spec.input.roi_size == (16, 16, 16)


def test_unsupported_transforms_are_reported(import_bundle: Callable[..., ImportResult]) -> None:
    orientation, crop = {"_target_": "Orientationd", "axcodes": "RAS"}, {"_target_": "CropForegroundd"}
    inference = make_preprocessing_config(orientation, RANGE, crop)
    with pytest.raises(UnsupportedPackage, match=r"not supported: .*Orientationd, .*CropForegroundd"):
        import_bundle(inference)
    spec, notes = import_bundle(inference, input={"normalisation": {"kind": "zscore"}})
    assert any("Orientationd" in note and "CropForegroundd" in note for note in notes)
    assert "CropForegroundd" in (spec.folder / "README.md").read_text()
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation: preprocessing: this key is missing"):
        import_bundle({key: value for key, value in INFERENCE.items() if key != "preprocessing"})


def test_statistics_computed_over_all_channels_are_rejected(write: BundleWriter, tmp_path: Path) -> None:
    bundle = write(
        make_preprocessing_config({"_target_": "NormalizeIntensityd"}), make_metadata("inputs", "image", num_channels=2)
    )
    with pytest.raises(UnsupportedPackage, match=r"channel_wise: statistics computed jointly over all channels"):
        import_model(bundle, tmp_path / "models", {})


def test_operator_overrides_resolve_problems(import_bundle: Callable[..., ImportResult]) -> None:
    overrides = {"normalisation": {"kind": "zscore"}, "voxel_size": [1.0, 0.5, 0.5]}
    spec = import_bundle(make_preprocessing_config({"_target_": "Spacingd", "pixdim": [1, 1, 1]}), input=overrides).spec
    assert (spec.input.normalisation.kind, spec.input.voxel_size) == ("zscore", (1.0, 0.5, 0.5))
    assert spec.input.channels == 1


def test_expressions_are_not_evaluated(import_bundle: Callable[..., ImportResult], tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    import_bundle(make_config(device=f"$__import__('pathlib').Path({str(trap)!r}).touch()"))
    assert not trap.exists()
