"""Tests of `ShuffleUNet` and its pixel shuffles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from service.models.architectures.shuffle_unet import ShuffleUNet, depth_to_space, space_to_depth

edges = st.tuples(*[st.integers(1, 3)] * 3)


@given(st.integers(1, 2), st.integers(1, 3), edges, edges)
def test_shuffles_are_inverses(batch: int, channels: int, blocks: tuple[int, ...], block: tuple[int, ...]) -> None:
    size = [n * b for n, b in zip(blocks, block, strict=True)]
    x = torch.arange(batch * channels * size[0] * size[1] * size[2]).reshape(batch, channels, *size)
    depth = space_to_depth(x, block)
    assert depth.shape == (batch, channels * block[0] * block[1] * block[2], *blocks)
    assert torch.equal(depth_to_space(depth, block), x)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_shuffle_within_planes_matches_torch(channels: int, planes: int, factor: int) -> None:
    x = torch.rand(1, channels, planes, 2 * factor, 3 * factor)
    depth = space_to_depth(x, (1, factor, factor))
    for plane in range(planes):
        assert torch.equal(depth[:, :, plane], nn.functional.pixel_unshuffle(x[:, :, plane], factor))


def test_block_becomes_the_channels_of_one_position() -> None:
    x = torch.arange(4 * 4 * 4).reshape(1, 1, 4, 4, 4)
    assert torch.equal(space_to_depth(x, (2, 2, 2))[0, :, 1, 0, 1], x[0, 0, 2:4, 0:2, 2:4].flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shuffle_unet_accepts_any_edges_divisible_by_its_strides(dtype: torch.dtype) -> None:
    network = ShuffleUNet(1, 2, widths=(4, 8, 8), block=(1, 2, 2)).eval().to(dtype)
    with torch.inference_mode():
        assert network(torch.rand(1, 1, 4, 8, 24, dtype=dtype)).shape == (1, 2, 4, 8, 24)
