"""Conformance of processing steps: all combinations of their arguments, against the results of bioimageio.core.

Each chain of steps is either reproduced or refused with the name of the field. The results were written by
`scripts/fixtures/bioimageio_core.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT

from service.core.errors import UnsupportedPackage
from service.core.types import Array
from service.inference.preprocessing.normalize import MAX_MAGNITUDE, fit_scaling
from service.models.importers.bioimageio_processing import read_activation, read_normalization
from service.models.importers.draft import Fields
from service.models.spec import Input

# Largest difference from the result of bioimageio.core, relative to the largest value, or to 1 if all are smaller.
TOLERANCE = 1e-5
ACTIVATIONS = {"none": torch.clone, "sigmoid": torch.sigmoid, "softmax": lambda scores: torch.softmax(scores, 1)}
# Number of chains that are reproduced, by their first step. All others are refused.
NUM_SUPPORTED_CHAINS = {
    "preprocessing": {
        "nothing": 2,
        "ensure_dtype": 12,
        "scale_linear": 32,
        "clip": 8,
        "scale_range": 140,
        "zero_mean_unit_variance": 28,
        "fixed_zero_mean_unit_variance": 16,
    },
    "postprocessing": {"nothing": 1, "ensure_dtype": 2, "sigmoid": 1, "softmax": 2},
}


@pytest.fixture(scope="module")
def data() -> dict[str, Array]:
    with np.load(ROOT / "tests" / "data" / "bioimageio" / "steps.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def cases(data: dict[str, Array]) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(str(data["cases"]))
    return cases


def preprocess(image: Array, tensor: Fields) -> Array:
    """Return the normalized image [1, C, z, y, x]."""
    channels, size = image.shape[1], image.shape[2:]
    normalization = read_normalization(tensor, channels)
    settings = Input.model_validate({"channels": channels, "normalisation": normalization, "roi_size": size})
    return np.stack(
        [fit_scaling(image[0, c], settings.get_normalization(c)).apply(image[0, c]) for c in range(channels)]
    )[None]


def postprocess(image: Array, tensor: Fields) -> Array:
    """Return the activated scores [1, K, z, y, x]."""
    probabilities: Array = ACTIVATIONS[read_activation(tensor)](torch.from_numpy(image / 1000)).numpy()
    return probabilities


@pytest.mark.parametrize(("side", "apply"), [("preprocessing", preprocess), ("postprocessing", postprocess)])
def test_steps_are_reproduced_or_refused(
    data: dict[str, Array], cases: list[dict[str, Any]], side: str, apply: Any
) -> None:
    supported, reasons = Counter[str](), list[str]()
    for index, case in enumerate(cases):
        if case["side"] != side:
            continue
        tensor = Fields({side: case["chain"]}, "inputs[0]")
        try:
            result = apply(data["image"][:, : case["channels"]], tensor)
        except UnsupportedPackage as error:
            reasons.append(str(error))
            continue
        # Larger values would distort the scores of a whole window, so the service limits them.
        expected = np.clip(data[f"result_{index}"], -MAX_MAGNITUDE, MAX_MAGNITUDE)
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max()), case
        first = case["chain"][0] if case["chain"] else {"id": "nothing"}
        supported[first.get("id") or first["name"]] += 1
    assert all(reason.startswith(f"inputs[0].{side}[") for reason in reasons)
    assert supported == NUM_SUPPORTED_CHAINS[side]
