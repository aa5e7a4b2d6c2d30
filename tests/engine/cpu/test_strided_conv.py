"""Tests that the strided convolution kernel gives the same results as torch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.engine.cpu import strided_conv

FORMAT = torch.channels_last_3d
# Relative to the largest result: float32 sums are computed in a different order, and BF16 results are rounded once.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


def make_layer(in_channels, out_channels, block=(2, 2, 2), *, transposed=False, bias=True, dtype=torch.float32):
    torch.manual_seed(in_channels + out_channels)
    module_type = nn.ConvTranspose3d if transposed else nn.Conv3d
    return (
        module_type(in_channels, out_channels, block, stride=block, bias=bias)
        .to(dtype)
        .requires_grad_(requires_grad=False)
    )


def compute_in_float64(module, x, slope=1.0):
    return nn.functional.leaky_relu(copy.deepcopy(module).double()(x.double()), slope)


@settings(max_examples=80, deadline=None)
@given(
    size=st.tuples(*[st.integers(3, 9)] * 2, st.integers(3, 60)),
    block=st.tuples(*[st.integers(1, 3)] * 3),
    batch=st.integers(1, 3),
    in_channels=st.integers(1, 40),
    out_channels=st.integers(1, 100),
    transposed=st.booleans(),
    bias=st.booleans(),
    slope=st.sampled_from([0.0, 0.01, 1.0, 1.5, -1.0]),
    dtype=st.sampled_from(strided_conv.SUPPORTED_DTYPES),
)
@torch.inference_mode()
def test_results_match_torch_for_any_shape(
    size, block, batch, in_channels, out_channels, transposed, bias, slope, dtype
):
    module = make_layer(in_channels, out_channels, block, transposed=transposed, bias=bias, dtype=dtype)
    x = torch.randn(batch, in_channels, *size).to(dtype)
    expected, y = compute_in_float64(module, x, slope), strided_conv.StridedConvolution(module, slope)(x)
    assert (y.shape, y.dtype) == (expected.shape, dtype)
    assert y.stride(1) == 1, "channels last, even for one channel"
    assert (y - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv3d(8, 16, 3, padding=1),
        nn.Conv3d(8, 16, 2),
        nn.Conv3d(8, 16, 2, stride=2, padding=1),
        nn.Conv3d(8, 16, 2, stride=2, groups=2),
        nn.Conv3d(8, 16, 2, stride=2).double(),
        nn.Conv3d(8, 3, 1),
        nn.ConvTranspose3d(8, 16, 3, stride=2),
        nn.ConvTranspose3d(8, 16, 2, stride=2, output_padding=1),
        nn.Conv2d(8, 16, 1),
        nn.Linear(8, 16),
    ],
    ids=repr,
)
def test_unsupported_layers_are_not_replaceable(module):
    assert not strided_conv.is_replaceable(module)
