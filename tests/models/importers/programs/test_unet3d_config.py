"""Tests of translating the configurations of PlantSeg and pytorch-3dunet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.core.errors import UnsupportedPackage
from service.core.types import Volume
from service.inference.preprocessing.normalize import normalize_volume
from service.models.importers.draft import Fields
from service.models.importers.programs.unet3d_config import (
    PATCH_STATISTICS_NOTE,
    predicts_boundaries,
    read_normalization,
    read_patch_size,
)
from service.models.spec import ModelSpec


def make_config(*steps: dict[str, Any], **loaders: Any) -> Fields:
    transformer = {"raw": [*steps, {"name": "ToTensor", "expand_dims": True}]}
    return Fields({"loaders": {"val": {"transformer": transformer}, **loaders}})


def normalize(step: dict[str, Any], stack: Any) -> Any:
    """Apply the formulas of pytorch-3dunet."""
    eps = step.get("eps", 1e-10)
    if step["name"] == "Standardize":
        mean, deviation = step.get("mean", stack.mean()), step.get("std", stack.std())
        return (stack - mean) / max(deviation, eps)
    if step["name"] == "PercentileNormalizer":
        low, high = (np.percentile(stack, step.get(key, value)) for key, value in (("pmin", 1), ("pmax", 99.6)))
        return (stack - low) / (high - low + eps)
    low, high = step.get("min_value", stack.min()), step.get("max_value", stack.max())
    unit = (stack - low) / (high - low + eps)
    is_unit_range = step.get("norm01") or step.get("normalize")
    return unit.clip(0, 1) if is_unit_range else (2 * unit - 1).clip(-1, 1)


@pytest.mark.parametrize(
    "step",
    [
        {"name": "Standardize", "channelwise": True},
        {"name": "Standardize", "mean": 10, "std": 4.0},
        {"name": "PercentileNormalizer", "pmin": 2},
        {"name": "Normalize", "min_value": 20, "max_value": 180},
        {"name": "Normalize", "min_value": 20, "max_value": 180, "norm01": True},
        {"name": "Normalize", "norm01": True},
        {"name": "Standardize", "eps": 1e-3},
        {"name": "Standardize", "mean": 10, "std": 4.0, "eps": 50},
        {"name": "PercentileNormalizer", "eps": 0.1},
        {"name": "Normalize", "min_value": 20, "max_value": 180, "eps": 40},
        {"name": "Normalize", "norm01": True, "eps": 0.1},
        {"name": "ToTensor", "normalize": True},
    ],
    ids=str,
)
def test_translated_normalization_has_the_same_effect(step: dict[str, Any], bands: ModelSpec) -> None:
    stack = np.random.default_rng(0).integers(0, 256, (4, 20, 30)).astype(np.float32)
    normalization, _ = read_normalization(make_config(step), 1)
    content = bands.model_dump() | {"folder": bands.folder}
    content["input"] |= {"normalisation": normalization, "channels": 1, "channel_names": ()}
    spec = ModelSpec.model_validate(content)
    image, _ = normalize_volume(Volume.from_array(stack[None]), spec)
    np.testing.assert_allclose(image.to_tensor()[0, 0].numpy(), normalize(step, stack), atol=2e-5)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (({"name": "CropToFixed"},), "'CropToFixed' is not supported"),
        (({"name": "Standardize"}, {"name": "Normalize"}), "'Normalize' is not supported"),
        (({"name": "Normalize"},), "norm01: scaling the stack's range"),
        (({"name": "Normalize", "min_value": 2, "max_value": 1},), "max_value: the range is empty"),
        (({"name": "Standardize", "mean": 1.0, "std": 0},), "std: expected a positive number"),
        (({"name": "Standardize", "mask": 1},), "the argument 'mask' of Standardize"),
        (({"name": "Standardize", "mean": float("nan"), "std": 1},), "mean: expected a number"),
        (({"name": ["Standardize"]},), "name: expected a string"),
        ((["Standardize"],), "expected a mapping"),
        (({"name": "Standardize"}, {"name": "ToTensor", "normalize": True}), "'Normalize' is not supported"),
        (({"name": "ToTensor", "dtype": "long"},), "dtype: only float32"),
        (({"name": "Standardize", "eps": 5},), "eps: expected a number from 0 to 0.001"),
        (({"name": "PercentileNormalizer", "eps": 5},), "eps: expected a number from 0 to 0.1"),
    ],
)
def test_unsupported_transforms_are_rejected_by_name(steps: Any, message: str) -> None:
    with pytest.raises(UnsupportedPackage, match=message):
        read_normalization(make_config(*steps), 1)


def test_joint_statistics_of_several_channels_are_rejected() -> None:
    message = "statistics computed jointly over all channels"
    for step, key in (
        ({"name": "Standardize"}, "channelwise"),
        ({"name": "Normalize", "norm01": True}, "min_value"),
        ({"name": "ToTensor", "normalize": True}, "min_value"),
    ):
        with pytest.raises(UnsupportedPackage, match=f"{key}: {message}"):
            read_normalization(make_config(step), 2)
    channelwise = {"name": "Standardize", "channelwise": True}
    assert read_normalization(make_config(channelwise), 2)[0] == {"kind": "zscore"}
    with pytest.raises(UnsupportedPackage, match=f"global_normalization: {message}.*channelwise"):
        read_normalization(make_config(channelwise, global_normalization=True), 2)


def test_percentiles_that_global_normalization_replaces_are_rejected() -> None:
    config = make_config({"name": "PercentileNormalizer", "pmin": 1}, global_normalization=True)
    with pytest.raises(UnsupportedPackage, match=r"pmin: with loaders\.global_normalization"):
        read_normalization(config, 1)


def test_statistics_of_patches_are_reported_in_a_note() -> None:
    step = {"name": "Standardize"}
    assert read_normalization(make_config(step), 1)[1] == (PATCH_STATISTICS_NOTE,)
    assert read_normalization(make_config(step, global_normalization=True), 1)[1] == ()


def test_configuration_without_transforms_is_that_of_plantseg() -> None:
    assert read_normalization(Fields({}), 1) == ({"kind": "zscore"}, ())
    assert predicts_boundaries(Fields({}))


def test_augmentations_of_the_training_are_ignored() -> None:
    steps = [{"name": "Standardize"}, {"name": "RandomFlip"}, {"name": "GaussianBlur3D"}]
    config = Fields({"loaders": {"train": {"transformer": {"raw": steps}}, "global_normalization": True}})
    assert read_normalization(config, 1) == ({"kind": "zscore"}, ())


@pytest.mark.parametrize(("name", "expected"), [("BlobsToMask", False), ("StandardLabelToBoundary", True)])
def test_conversion_of_labels_to_boundaries_is_detected(name: str, expected: bool) -> None:
    loader = {"transformer": {"label": [{"name": name}]}}
    assert predicts_boundaries(Fields({"loaders": {"train": loader}})) is expected


@pytest.mark.parametrize("size", [[1, 2], "80", [80, 0, 80], [80.0, 160, 160], {"z": 80}])
def test_invalid_patch_sizes_are_rejected(size: Any) -> None:
    with pytest.raises(UnsupportedPackage, match=r"loaders\.train\.slice_builder\.patch_shape: expected three"):
        read_patch_size(Fields({"loaders": {"train": {"slice_builder": {"patch_shape": size}}}}))
