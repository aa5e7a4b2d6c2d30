"""Conformance tests: imported transforms compute what MONAI computes, or an argument is rejected by name."""

from __future__ import annotations

import itertools
from typing import Any

import monai.transforms
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from service.core.errors import UnsupportedPackage
from service.inference.preprocessing.normalize import fit_scaling
from service.models.importers.draft import Fields
from service.models.importers.monai import bundle
from service.models.importers.monai.normalization import translate_normalization
from service.models.spec_parts import Normalization

SIZE = (6, 8, 9)
RNG = np.random.default_rng(7)
# Several distributions: negative values, a constant, zeros, many zeros, a small range.
CHANNELS = {
    "normal": RNG.normal(-20, 300, SIZE),
    "constant": np.full(SIZE, 37.5),
    "zeros": np.zeros(SIZE),
    "sparse": np.where(RNG.random(SIZE) < 0.6, RNG.integers(0, 4000, SIZE), 0),
    "small": RNG.random(SIZE) * 0.1 + 0.5,
}
MISSING = "missing"
TARGETS = [MISSING, None, 0, 1, -1.5]
# Values of each argument, and the number of combinations that are imported for one and for two channels.
CASES: dict[str, tuple[dict[str, list[Any]], tuple[int, int]]] = {
    "ScaleIntensityRanged": (
        {"a_min": [-57, 5, None, "1"], "a_max": [164.5, 5], "b_min": TARGETS, "b_max": TARGETS, "clip": [False, True]}
        | {"dtype": [MISSING, None, "float64", "uint8", "float16"]},
        (225, 225),
    ),
    "ScaleIntensityRangePercentilesd": (
        {"lower": [0, 5, 70], "upper": [100, 95.5, 60], "b_min": [None, 0, 1, -1], "b_max": [None, 1, 2]}
        | {"clip": [False, True], "relative": [False, True], "channel_wise": [False, True], "dtype": [MISSING, "int"]},
        (96, 48),
    ),
    "ScaleIntensityd": (
        {"minv": [MISSING, None, 0, -1], "maxv": [MISSING, None, 1, 2], "factor": [MISSING, None, -0.5, 2, -1, "2"]}
        | {"channel_wise": [MISSING, False, True], "dtype": [MISSING, "float32", "half"]},
        (168, 72),
    ),
    "NormalizeIntensityd": (
        {"subtrahend": [MISSING, 3, [3.5], [1, 2], "3"], "divisor": [MISSING, 2, 0, [4.0], [0, 3], [1], [1, 2, 3]]}
        | {"nonzero": [MISSING, True], "channel_wise": [MISSING, True], "dtype": [MISSING, "np.float64"]},
        (12, 8),
    ),
}


def list_combinations(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    combinations = [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]
    return [{key: value for key, value in item.items() if value is not MISSING} for item in combinations]


def normalize(image: np.ndarray, content: Any) -> np.ndarray:
    items = content if isinstance(content, list) else [content] * len(image)
    specs = [TypeAdapter(Normalization).validate_python(item) for item in items]
    return np.stack([fit_scaling(pixels, spec).apply(pixels) for pixels, spec in zip(image, specs, strict=True)])


def translate(name: str, arguments: dict[str, Any], num_channels: int) -> tuple[Any, str]:
    """Return the normalization and "", or None and the name of the rejected argument."""
    try:
        return translate_normalization(name, Fields(arguments), num_channels), ""
    except UnsupportedPackage as error:
        return None, str(error).partition(":")[0]


@pytest.mark.filterwarnings("ignore:Divide by zero")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_channels", [1, 2])
def test_transform_is_reproduced_or_an_argument_is_rejected_by_name(name: str, num_channels: int) -> None:
    values, num_imported = CASES[name]
    pairs = itertools.pairwise([*CHANNELS.values(), CHANNELS["normal"]])
    images = [np.stack(pair[:num_channels]).astype(np.float32) for pair in pairs]
    imported = 0
    for arguments in list_combinations(values):
        content, rejected = translate(name, arguments, num_channels)
        if rejected:
            assert rejected in {*values, "channel_wise"}
            continue
        imported += 1
        dtype = {"dtype": np.float64 if "64" in str(arguments["dtype"]) else np.float32} if "dtype" in arguments else {}
        transform = getattr(monai.transforms, name)(keys="image", **arguments | dtype)
        for image in images:
            expected = np.asarray(transform({"image": torch.from_numpy(image.copy())})["image"])
            tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(normalize(image, content), expected, atol=tolerance, err_msg=str(arguments))
    assert imported == num_imported[num_channels - 1]


@pytest.mark.parametrize(
    ("name", "arguments", "argument"),
    [
        ("Activationsd", {"sigmoid": [True, False]}, "sigmoid"),
        ("Activationsd", {"softmax": True, "dim": 1}, "dim"),
        ("AsDiscreted", {"argmax": True, "dim": 1}, "dim"),
        ("AsDiscreted", {"argmax": [True, False]}, "argmax"),
        ("AsDiscreted", {"rounding": "torchrounding"}, "rounding"),
        ("AsDiscreted", {"threshold": 0.5}, "_target_"),
        ("Activationsd", {"softmax": "$not @is_binary"}, "softmax"),
        ("AsDiscreted", {"argmax": ["@flag", True]}, "argmax"),
        ("AsDiscreted", {"argmax": True, "_disabled_": "$@flag"}, "_disabled_"),
        ("EnsureTyped", {"dtype": ["float32", "int8"]}, "dtype"),
    ],
)
def test_postprocessing_that_changes_scores_is_rejected(name: str, arguments: dict[str, Any], argument: str) -> None:
    step = {"_target_": name, **arguments}
    with pytest.raises(UnsupportedPackage, match=rf"transforms\[0\]\.{argument}:"):
        bundle._read_activation(Fields({"postprocessing": {"transforms": [step]}}))


@pytest.mark.parametrize("disabled", [True, "true", " True", 1])
@pytest.mark.parametrize("flag", [True, [True], [True, True], 1])
def test_postprocessing_is_reproduced(disabled: object, flag: object) -> None:
    skipped = {"_target_": "AsDiscreted", "threshold": 0.5, "_disabled_": disabled}
    for kind, activate in (("sigmoid", torch.sigmoid), ("softmax", lambda scores: torch.softmax(scores, 0))):
        step = {"_target_": "Activationsd", kind: flag}
        argmax = {"_target_": "AsDiscreted", "argmax": flag}
        typed = {"_target_": "CastToTyped", "dtype": "uint8"}
        chain = {"postprocessing": {"transforms": [skipped, step, argmax, typed]}}
        assert bundle._read_activation(Fields(chain)) == (kind, True)
        scores = torch.randn(3, 4, 4, 4)
        keys = ["pred", "other"]
        transform = monai.transforms.Activationsd(keys=keys, **{kind: flag if flag != [True] else True})
        assert torch.allclose(transform({"pred": scores, "other": scores})["pred"], activate(scores))
    assert bundle._read_activation(Fields({})) == ("none", False)


@pytest.mark.parametrize("argument", [{"scale_extent": True}, {"padding_mode": "zeros"}, {"dtype": "int16"}])
def test_spacing_with_other_values_at_the_border_is_rejected(argument: dict[str, Any]) -> None:
    step = {"_target_": "Spacingd", "pixdim": 2, **argument}
    with pytest.raises(UnsupportedPackage, match=rf"transforms\[0\]\.{next(iter(argument))}:"):
        bundle._read_spacing(Fields({"preprocessing": {"transforms": [step]}}))
