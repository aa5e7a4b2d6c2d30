"""Tests of the processing steps of exported packages: an import has to read the same normalization and activation."""

from __future__ import annotations

from typing import Any

import pytest

from service.core.errors import UnsupportedPackage
from service.models.exporters.bioimageio_processing import make_postprocessing, make_preprocessing
from service.models.importers.bioimageio_processing import read_activation, read_normalization
from service.models.importers.draft import Fields
from service.models.input_spec import Input
from service.models.spec import ActivationName


def make_input(*normalizations: dict[str, Any]) -> Input:
    return Input.model_validate(
        {"channels": len(normalizations), "normalisation": list(normalizations), "roi_size": (8, 8, 8)}
    )


@pytest.mark.parametrize(
    "normalizations",
    [
        [{"kind": "percentile", "low": 1.0, "high": 99.8, "eps": 1e-3}],
        [{"kind": "percentile", "low": 0.0, "high": 100.0, "eps": 0.1, "clip": [-1.0, 2.0]}],
        [{"kind": "zscore", "eps": 1e-4}],
        [{"kind": "zscore", "eps": 1e-4}, {"kind": "zscore", "eps": 1e-4}],
        [{"kind": "range", "low": 0.0, "high": 1.0}],
        [{"kind": "range", "low": 0.0, "high": 1.0, "clip": [0.0, 0.5]}],
        [{"kind": "range", "low": 128.0, "high": 4224.0, "clip": [-1.0, 1.0]}],
        [{"kind": "range", "low": -64.0, "high": 64.0}, {"kind": "range", "low": 2.0, "high": 1.0}],
    ],
)
def test_normalization_is_restored(normalizations: list[dict[str, Any]]) -> None:
    settings = make_input(*normalizations)
    tensor = Fields({"preprocessing": make_preprocessing(settings)})
    restored = read_normalization(tensor, len(normalizations))
    items = restored if isinstance(restored, list) else [restored] * len(normalizations)
    assert make_input(*items).normalisation == settings.normalisation


@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax"])
def test_activation_is_restored(activation: ActivationName) -> None:
    assert read_activation(Fields({"postprocessing": make_postprocessing(activation)})) == activation


@pytest.mark.parametrize(
    ("normalizations", "message"),
    [
        ([{"kind": "zscore"}, {"kind": "percentile"}], "the channels have different normalizations"),
        (
            [{"kind": "range", "low": 0, "high": 2, "clip": [0, 1]}, {"kind": "range", "low": 0, "high": 2}],
            r"normalisation\.clip: the channels have different limits",
        ),
        ([{"kind": "percentile", "low": 0.1, "high": 0.9}], r"normalisation\.high: the percentile is 0\.9"),
    ],
)
def test_normalizations_without_equivalent_steps_are_rejected(
    normalizations: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UnsupportedPackage, match=message):
        make_preprocessing(make_input(*normalizations))
