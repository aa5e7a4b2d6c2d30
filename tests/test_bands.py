"""Tests of the `bands` model: its stored weights, and its training recipe."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bands import Phantom, load_bands, train_bands
from torch import nn


@pytest.mark.parametrize("make", [load_bands, pytest.param(train_bands, marks=pytest.mark.thorough)])
def test_model_separates_three_intensity_levels(make: Callable[[], nn.Module], phantom: Phantom) -> None:
    image = torch.from_numpy(phantom.image.astype(np.float32))[None, None] / 2800
    network = make()
    with torch.inference_mode():
        classes = network(image)[0].argmax(0).numpy()
    assert np.mean(classes == phantom.classes) > 0.97
