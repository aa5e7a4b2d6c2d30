"""MONAI bundles as `monai.bundle` writes them: imported, and served."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from importing import import_model, run
from monai.bundle import init_bundle
from torch import nn

from service.core.errors import UnsupportedPackage
from service.core.quantities import VoxelSize
from service.core.types import Volume
from service.models.importers.import_model import Imported

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


def changed(**replaced: Any) -> dict[str, Any]:
    return {**INFERENCE, **replaced}


def scaled(*steps: dict[str, Any]) -> dict[str, Any]:
    return changed(preprocessing={"_target_": "Compose", "transforms": list(steps)})


def with_formats(side: str, name: str, **stated: Any) -> dict[str, Any]:
    """METADATA with keys of an input or output changed."""
    metadata = copy.deepcopy(METADATA)
    tensor = metadata["network_data_format"][side][name]
    tensor |= stated
    return metadata


Write = Callable[..., Path]


@pytest.fixture
def write(bands_network: nn.Module, tmp_path: Path) -> Write:
    """write(inference, metadata) -> folder of a bundle with the weights of `bands`."""

    def write_bundle(inference: dict[str, Any] = INFERENCE, metadata: dict[str, Any] = METADATA) -> Path:
        folder = tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}"
        init_bundle(folder, network=bands_network, metadata_str=metadata, inference_str=inference)
        return folder

    return write_bundle


@pytest.fixture
def imported(write: Write, tmp_path: Path) -> Callable[..., Imported]:
    """imported(inference, **stated keys of the model file) -> the model made of such a bundle."""
    return lambda inference, **stated: import_model(write(inference), tmp_path / "models", stated)


def test_a_bundle_is_served_like_the_model_it_holds(write: Write, tmp_path: Path, phantom: Any) -> None:
    bundle = write(metadata=METADATA | {"description": "Bands\r\nof \x1b[31mbrightness."})
    spec, notes = import_model(bundle, tmp_path / "models", {})
    assert spec.summary == "Bands\nof [31mbrightness."
    assert (spec.identifier, spec.licence, spec.activation) == ("three-bands/0.2.1", "CC0", "softmax")
    assert (spec.outputs, spec.input.roi_size) == (("background", "dim", "bright"), (16, 32, 32))
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["three-bands"]
    found = run(spec, Volume.from_array(phantom.image[None])).segmentation
    assert np.mean(found.pixels == phantom.classes) > 0.97
    assert any("Z, Y, X" in note for note in notes)


def test_a_bundle_of_torchscript_and_yaml_gives_the_same(
    bands_network: nn.Module, write: Write, tmp_path: Path
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
            {"kind": "percentile", "low": 1.0, "high": 99.0, "clip": None},
        ),
        ("NormalizeIntensityd", {"channel_wise": True}, {"kind": "zscore"}),
        (
            "NormalizeIntensityd",
            {"subtrahend": 10, "divisor": 4},
            {"kind": "range", "low": 10.0, "high": 14.0, "clip": None},
        ),
    ],
)
def test_known_normalisations_are_translated(
    imported: Callable[..., Imported], name: str, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = imported(scaled({"_target_": name, **arguments})).spec
    assert spec.input.normalisation.model_dump() == expected


@pytest.mark.parametrize(
    ("inference", "field"),
    [
        (
            scaled({"_target_": "Orientationd", "axcodes": "RAS"}),
            r"preprocessing.transforms\[0\]._target_: Orientationd",
        ),
        (scaled({"_target_": "NormalizeIntensityd", "nonzero": True}), r"preprocessing.transforms\[0\].nonzero"),
        (
            scaled({"_target_": "ScaleIntensityRanged", "a_min": "$2 + 3", "a_max": 9}),
            r"transforms\[0\].a_min: '\$2 \+ 3'",
        ),
        (changed(network_def={"_target_": "scripts.net.Mine"}), "network_def._target_: 'scripts.net.Mine'"),
        (changed(network_def=INFERENCE["network_def"] | {"channels": "$[8, 16]"}), "network_def.channels"),
        (changed(window="@nowhere"), "inferer.roi_size|spatial_shape"),
        (changed(a="@b", b="@a"), "circles"),
        (
            changed(a0="laugh" * 100, **{f"a{n}": [f"@a{n - 1}"] * 9 for n in range(1, 14)}),
            "references repeat more than",
        ),
        (changed(network_def={"_target_": "monai.networks.nets.os.system"}), "network_def._target_"),
        (
            changed(network_def={"_target_": "UNet", "_requires_": "$__import__('os')", "channels": "$7"}),
            "channels: '.7'",
        ),
        (changed(network_def=[]), "architecture: network: a mapping"),
        (changed(inferer=["roi_size"]), "inferer"),
        (
            changed(postprocessing={"transforms": [{"_target_": "Lambdad", "func": "$print"}]}),
            r"postprocessing.transforms\[0\]",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(write: Write, tmp_path: Path, inference: dict[str, Any], field: str) -> None:
    bundle = write(inference, with_formats("inputs", "image", spatial_shape=None))
    with pytest.raises(UnsupportedPackage, match=field):
        import_model(bundle, tmp_path / "models", {})
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("channels", [0, 10**9, "3", None])
def test_a_number_of_channels_that_no_network_has_is_refused(write: Write, tmp_path: Path, channels: Any) -> None:
    with pytest.raises(UnsupportedPackage, match="num_channels"):
        import_model(write(metadata=with_formats("outputs", "pred", num_channels=channels)), tmp_path / "models", {})


@pytest.mark.parametrize("name", ["configs/metadata.json", "configs/inference.json", "models/model.pt"])
def test_links_out_of_a_bundle_are_not_followed(write: Write, tmp_path: Path, name: str) -> None:
    bundle = write()
    (bundle / name).rename(tmp_path / "outside")
    (bundle / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsupportedPackage, match=f"{name}: not a file inside the package"):
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
    imported: Callable[..., Imported], pixdim: Any, expected: tuple[float, ...]
) -> None:
    step = {"_target_": "Spacingd", "keys": ["image", "label"], "pixdim": pixdim, "mode": ["bilinear", "nearest"]}
    spec, notes = imported(scaled(step, RANGE) | {"size": [4, 1, 1]})
    assert spec.input.voxel_size == expected
    assert spec.input.normalisation.kind == "range"
    assert any("Spacingd" in note and "um along Z, Y, X" in note for note in notes)
    volume = Volume.from_array(np.zeros((1, 8, 16, 16), np.uint16), VoxelSize(1.0, 1.0, 1.0))
    assert any("for the model's voxel size" in note for note in run(spec, volume).notes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pixdim": [1.0, -1.0, 1.0]},
        {"pixdim": "$[1, 1, 1]"},
        {"pixdim": [1.0, 1.0, 1.0], "mode": "nearest"},
        {"pixdim": [1.0, 1.0, 1.0], "max_pixdim": [2.0, 2.0, 2.0]},
        {},
    ],
)
def test_a_spacing_that_cannot_be_honoured_is_refused(imported: Callable[..., Imported], wrong: dict[str, Any]) -> None:
    steps = scaled({"_target_": "Spacingd", **wrong}, RANGE)
    with pytest.raises(UnsupportedPackage, match=r"input\.voxel_size: preprocessing\.transforms\[0\]"):
        imported(steps, input={"normalisation": {"kind": "zscore"}})
    spec, notes = imported(steps, input={"voxel_size": None})
    assert spec.input.voxel_size is None
    assert any("input.voxel_size is as you stated it" in note and "transforms[0]" in note for note in notes)


def test_no_transform_is_dropped_without_a_word(imported: Callable[..., Imported]) -> None:
    orientation, crop = {"_target_": "Orientationd", "axcodes": "RAS"}, {"_target_": "CropForegroundd"}
    steps = scaled(orientation, RANGE, crop)
    with pytest.raises(UnsupportedPackage, match=r"Orientationd, .*CropForegroundd cannot be honoured"):
        imported(steps)
    spec, notes = imported(steps, input={"normalisation": {"kind": "zscore"}})
    assert any("Orientationd" in note and "CropForegroundd" in note for note in notes)
    assert "CropForegroundd" in (spec.folder / "README.md").read_text()
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation: preprocessing: there is no such key"):
        imported({key: value for key, value in INFERENCE.items() if key != "preprocessing"})


def test_statistics_over_several_channels_together_are_refused(write: Write, tmp_path: Path) -> None:
    bundle = write(scaled({"_target_": "NormalizeIntensityd"}), with_formats("inputs", "image", num_channels=2))
    with pytest.raises(UnsupportedPackage, match=r"channel_wise: statistics over all channels together"):
        import_model(bundle, tmp_path / "models", {})


def test_what_the_operator_states_settles_a_problem(imported: Callable[..., Imported]) -> None:
    stated = {"normalisation": {"kind": "zscore"}, "voxel_size": [1.0, 0.5, 0.5]}
    spec = imported(scaled({"_target_": "Spacingd", "pixdim": [1, 1, 1]}), input=stated).spec
    assert (spec.input.normalisation.kind, spec.input.voxel_size) == ("zscore", (1.0, 0.5, 0.5))
    assert spec.input.channels == 1


def test_no_expression_is_evaluated(imported: Callable[..., Imported], tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    imported(changed(device=f"$__import__('pathlib').Path({str(trap)!r}).touch()"))
    assert not trap.exists()
