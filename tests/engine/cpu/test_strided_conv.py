"""Convolutions of patches against torch's own."""

import copy

import pytest
import torch
from fakes import with_library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.core.native.variants import list_supported
from service.engine.cpu import strided_conv

FORMAT = torch.channels_last_3d
# Of the scale of the results: float32 sums in another order, and BF16 results that are rounded once.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


def layer(inputs, outputs, block=(2, 2, 2), *, transposed=False, bias=True, dtype=torch.float32):
    torch.manual_seed(inputs + outputs)
    kind = nn.ConvTranspose3d if transposed else nn.Conv3d
    return kind(inputs, outputs, block, stride=block, bias=bias).to(dtype).requires_grad_(requires_grad=False)


def exactly(module, x, slope=1.0):
    return nn.functional.leaky_relu(copy.deepcopy(module).double()(x.double()), slope)


@settings(max_examples=80, deadline=None)
@given(
    size=st.tuples(*[st.integers(3, 9)] * 2, st.integers(3, 60)),
    block=st.tuples(*[st.integers(1, 3)] * 3),
    batch=st.integers(1, 3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 100),
    transposed=st.booleans(),
    bias=st.booleans(),
    slope=st.sampled_from([0.0, 0.01, 1.0, 1.5, -1.0]),
    dtype=st.sampled_from(strided_conv.DTYPES),
)
@torch.inference_mode()
def test_any_shape_gives_what_torch_gives(size, block, batch, inputs, outputs, transposed, bias, slope, dtype):
    module = layer(inputs, outputs, block, transposed=transposed, bias=bias, dtype=dtype)
    x = torch.randn(batch, inputs, *size).to(dtype)
    expected, y = exactly(module, x, slope), strided_conv.StridedConvolution(module, slope)(x)
    assert (y.shape, y.dtype) == (expected.shape, dtype)
    assert y.stride(1) == 1, "channels last, even where there is one"
    assert (y - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", strided_conv.DTYPES, ids=str)
@torch.inference_mode()
def test_fewer_windows_and_more_threads_give_the_same_bits(transposed, dtype):
    module = strided_conv.StridedConvolution(layer(24, 40, transposed=transposed, dtype=dtype), 0.0)
    x = torch.randn(3, 24, 6, 8, 10).to(dtype)
    before, scores = torch.get_num_threads(), module(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for windows in (1, 2, 3):
                assert torch.equal(module(x[:windows]), scores[:windows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", strided_conv.DTYPES, ids=str)
@torch.inference_mode()
def test_a_value_that_is_not_finite_is_not_lost(value, slope, dtype):
    x = torch.zeros(1, 8, 4, 4, 4, dtype=dtype)
    x[0, 0, 1, 2, 3] = value
    module = layer(8, 16, dtype=dtype)
    y = strided_conv.StridedConvolution(module, slope)(x)
    assert not torch.isfinite(y.sum())
    if value != value:
        assert torch.equal(y.isnan(), module(x).isnan())


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 0.0), (0.1, -torch.inf), (1.0, -torch.inf)])
@torch.inference_mode()
def test_activations_of_infinity(slope, expected):
    module = layer(8, 16)
    module.bias.fill_(-torch.inf)
    assert (strided_conv.StridedConvolution(module, slope)(torch.ones(1, 8, 4, 4, 4)) == expected).all()


@pytest.mark.parametrize("variant", list_supported(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("transposed", [False, True])
@torch.inference_mode()
def test_every_variant_computes_the_same(variant, transposed, monkeypatch):
    monkeypatch.setattr(strided_conv, "KERNELS", with_library(strided_conv.KERNELS, variant))
    for dtype, tolerance in TOLERANCES.items():
        module = layer(13, 44, transposed=transposed, dtype=dtype)
        x = torch.randn(2, 13, 4, 6, 10).to(dtype)
        expected, y = exactly(module, x, 0.0), strided_conv.StridedConvolution(module, 0.0)(x)
        assert (y - expected).abs().max() <= tolerance * expected.abs().max()


def test_where_kernels_are_missing_the_error_says_so(monkeypatch):
    monkeypatch.setattr(strided_conv, "KERNELS", with_library(strided_conv.KERNELS))
    with pytest.raises(OSError, match="AVX2"):
        strided_conv.StridedConvolution(layer(8, 16))


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
def test_others_are_left_alone(module):
    assert not strided_conv.is_replaceable(module)


@pytest.mark.parametrize("x", [torch.zeros(1, 7, 4, 4, 4), torch.zeros(1, 8, 4, 4, 4).bfloat16()])
def test_what_there_are_no_weights_for_is_refused(x):
    with pytest.raises(RuntimeError, match="no weights"):
        strided_conv.StridedConvolution(layer(8, 16))(x)


@pytest.mark.parametrize("size", [(0, 8, 4, 4, 4), (1, 8, 0, 4, 4)])
def test_nothing_gives_nothing(size):
    assert strided_conv.StridedConvolution(layer(8, 16, transposed=True))(torch.zeros(size)).numel() == 0
