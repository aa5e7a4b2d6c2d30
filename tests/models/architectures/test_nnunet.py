"""Tests of nnU-Net's networks. tests/models/importers/programs/test_nnunet.py compares their scores with nnU-Net's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from service.core.errors import BrokenModel
from service.models.architectures.build import build_network, describe_tensors
from service.models.spec import Architecture

ARGUMENTS: dict[str, Any] = {
    "in_channels": 1,
    "out_channels": 2,
    "features": [4, 8],
    "kernel_sizes": [[1, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2]],
    "num_blocks": [1, 2],
    "num_convs": [1],
}
NAMES = ["PlainConvUNet", "ResidualEncoderUNet"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["InstanceNorm3d", "BatchNorm3d"])
def test_scores_have_the_size_of_the_window(name: str, norm: str) -> None:
    network = build_network(Architecture(name=name, arguments={**ARGUMENTS, "norm": norm, "num_folds": 2}))
    assert network.eval()(torch.zeros(2, 1, 5, 8, 12)).shape == (2, 2, 5, 8, 12)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_of_the_original_package(name: str) -> None:
    names = describe_tensors(Architecture(name=name, arguments=ARGUMENTS))
    first = "stages.0.0.convs.0" if name == "PlainConvUNet" else "stages.0.blocks.0.conv1"
    for expected in (f"encoder.{first}.conv.weight", f"encoder.{first}.norm.bias", "decoder.seg_layers.0.weight"):
        assert expected in names
    assert {"decoder.transpconvs.0.weight", "decoder.stages.0.convs.0.conv.weight"} <= names.keys()
    assert ("encoder.stages.1.blocks.0.skip.1.conv.weight" in names) == (name == "ResidualEncoderUNet")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": [4]}, "must describe the levels"),
        ({"num_convs": [1, 1]}, "must describe the levels"),
        ({"strides": [[1, 1, 1], [1, 0, 2]]}, "must be positive"),
        ({"strides": [[1, 1], [2, 2]]}, "not enough values"),
        ({"norm": "Dropout3d"}, "'Dropout3d'"),
        ({"weights": "x"}, "weights"),
        ({"num_folds": 10**9}, "num_folds exceeds 100"),
        ({"num_blocks": [10**9, 1]}, "more than 256 blocks"),
    ],
)
def test_invalid_arguments_are_rejected(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=rf"{name} does not accept the arguments .*{message}"):
        describe_tensors(Architecture(name=name, arguments={**ARGUMENTS, **changes}))


def test_missing_arguments_are_listed() -> None:
    with pytest.raises(BrokenModel, match="these arguments are missing: features, num_convs"):
        build_network(
            Architecture(
                name="PlainConvUNet",
                arguments={key: value for key, value in ARGUMENTS.items() if key not in {"features", "num_convs"}},
            )
        )
