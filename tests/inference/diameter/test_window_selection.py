"""Order of the windows of an image: windows with objects come first."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.core.quantities import Size
from service.inference.diameter.window_selection import rank_by_contrast

ROI = (32, 32, 32)


def rank(pixels: NDArray[Any], roi: Size = ROI) -> list[Size]:
    image: Tensor = torch.from_numpy(pixels.astype(np.float32))[None, None]
    return rank_by_contrast(image, roi)


def test_windows_with_high_contrast_come_first() -> None:
    pixels = np.zeros((32, 96, 128))
    pixels[10:20, 60:70, 100:110] = 1
    z, y, x = rank(pixels)[0]
    assert 0 <= z - 10 < 10
    assert abs(y - 65) <= 16
    assert abs(x - 105) <= 16


@pytest.mark.parametrize("angle", [0, 30, 90, 200])
def test_a_few_dim_objects_come_before_the_edge_of_a_bright_sample(angle: float) -> None:
    shape = (16, 256, 256)
    _, y, x = np.indices(shape) - 128
    radians = np.deg2rad(angle)
    inside = y * np.cos(radians) + x * np.sin(radians) + 48
    pixels = np.where(inside > 0, 0.5, 0.0) + np.random.default_rng(0).normal(0, 0.03, shape)
    row, column = (128 + 32 * np.array([np.cos(radians), np.sin(radians)])).astype(int)
    pixels[:, row - 4 : row + 4, column - 4 : column + 4] += 0.3
    _, y0, x0 = rank(pixels)[0]
    assert max(abs(y0 - row), abs(x0 - column)) <= ROI[1] // 2 + 4


def test_an_object_comes_before_a_gradient_of_the_background() -> None:
    pixels = np.broadcast_to(np.clip((np.arange(192) - 64) / 96, 0, 1), (16, 192, 192)).copy()
    pixels[:, 20:28, 20:28] += 0.3
    _, y, x = rank(pixels)[0]
    assert max(abs(y - 24), abs(x - 24)) <= ROI[1] // 2 + 4


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 70), (3, 65, 33)])
@pytest.mark.parametrize("roi", [(1, 1, 1), (64, 64, 64), (16, 48, 96)])
def test_centers_are_within_the_image(shape: Size, roi: Size) -> None:
    centers = rank(np.random.default_rng(0).random(shape), roi)
    assert centers
    assert all(0 <= position < length for center in centers for position, length in zip(center, shape, strict=True))
