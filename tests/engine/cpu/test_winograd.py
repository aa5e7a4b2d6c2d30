"""Tests that the Winograd kernel gives the same results as torch's float64 convolutions."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.engine.cpu import winograd
from service.engine.cpu.graph import CpuGraph, capture

FORMAT = torch.channels_last_3d


def make_convolution(in_channels, out_channels, *, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=bias).requires_grad_(requires_grad=False)


def compute_reference(layer, x):
    return nn.functional.conv3d(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double(), padding=1
    )


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 19)] * 3),
    batch=st.integers(1, 3),
    in_channels=st.sampled_from([8, 16, 24, 32, 40]),
    out_channels=st.sampled_from([16, 32, 48, 64, 80]),
    bias=st.booleans(),
    slope=st.sampled_from([0.0, 0.01, 0.25, 1.0, 1.5, -1.0]),
    dtype=st.sampled_from(winograd.SUPPORTED_DTYPES),
    matmul_precision=st.sampled_from(["highest", "high"]),
    seed=st.integers(0, 2**31),
)
def test_results_match_torch_for_any_shape(
    size, batch, in_channels, out_channels, bias, slope, dtype, matmul_precision, seed
):
    layer = make_convolution(in_channels, out_channels, bias=bias, seed=seed).to(dtype)
    x = torch.randn(batch, in_channels, *size).to(dtype)
    expected = nn.functional.leaky_relu(compute_reference(layer, x), slope)
    result = winograd.WinogradConvolution(layer, slope, matmul_precision)(x)
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=FORMAT)
    # Stored results are rounded once, by at most half a unit in the last place.
    rounding = expected.abs() * 2**-8 if dtype == torch.bfloat16 else 0.0
    is_exact = dtype == torch.float32 and matmul_precision == "highest"
    assert ((result - expected).abs() < (6e-5 if is_exact else 5e-4) + rounding).all()


def test_result_does_not_depend_on_the_block_size(monkeypatch):
    layer = winograd.WinogradConvolution(make_convolution(16, 32))
    x = torch.randn(2, 16, 13, 18, 9)
    expected = layer(x)
    for tile_count in (1, 30, 500):
        monkeypatch.setattr(winograd, "TILES_PER_BLOCK", tile_count)
        assert torch.equal(layer(x), expected)


@settings(max_examples=30, deadline=None)
@given(
    tile=st.sampled_from(winograd.LARGE_TILES),
    size=st.tuples(*[st.integers(1, 19)] * 3),
    in_channels=st.sampled_from([8, 24, 32]),
    dtype=st.sampled_from(winograd.SUPPORTED_DTYPES),
    seed=st.integers(0, 2**31),
)
def test_large_tiles_give_the_same_results_within_their_rounding_errors(tile, size, in_channels, dtype, seed):
    layer = make_convolution(in_channels, 48, seed=seed).to(dtype)
    x = torch.randn(2, in_channels, *size).to(dtype)
    expected = compute_reference(layer, x)
    result = winograd.convolve(x, winograd.pack_weights(layer.weight, tile), layer.bias.float(), 48, 1.0)
    rounding = expected.abs() * 2**-8 if dtype == torch.bfloat16 else 0.0
    assert ((result - expected).abs() < 5e-4 + rounding).all()


def test_large_tiles_are_used_only_if_there_are_many():
    assert winograd.choose_tile((32, 32, 32)) == (8, 8, 4)
    assert winograd.choose_tile((16, 16, 16)) == (8, 4, 4)
    for size in [(8, 8, 8), (4, 64, 64), (1, 512, 512)]:
        assert winograd.choose_tile(size) == winograd.SMALL_TILE


def test_highest_precision_excludes_large_tiles_in_float32():
    layer = make_convolution(16, 32)
    x = torch.randn(1, 16, 32, 32, 32)
    expected = compute_reference(layer, x)
    scale = expected.abs().max()
    exact, fast = (
        (winograd.replace_convolutions(nn.Sequential(layer), precision)(x) - expected).abs().max() / scale
        for precision in ("highest", "high")
    )
    assert exact < 1e-5
    # As much as TF32, which rounds factors to eleven bits, would add.
    assert exact < fast < 2**-11


def test_scores_of_a_window_do_not_depend_on_the_batch():
    layer = winograd.WinogradConvolution(make_convolution(16, 32).bfloat16())
    x = torch.randn(3, 16, 32, 24, 20).bfloat16()
    assert torch.equal(layer(x)[1:2], layer(x[1:2]))


def test_layers_with_large_tiles_are_captured():
    layer = winograd.WinogradConvolution(make_convolution(8, 16).bfloat16())
    x = torch.randn(2, 8, 32, 32, 32).to(torch.bfloat16, memory_format=FORMAT)
    graph = capture(layer, x)
    assert isinstance(graph, CpuGraph)
    assert torch.equal(graph(x), layer(x))


def choose_block_tiles(tile_count, tiles_per_row, thread_count):
    return winograd.KERNELS.call("stackseg_blocking", tile_count, tiles_per_row, winograd.TILES_PER_BLOCK, thread_count)


def test_blocks_are_whole_rows_unless_rows_are_long_and_every_thread_has_work():
    for tiles_per_row in (1, 3, 8, 9, 16, 25, 100):
        assert (
            choose_block_tiles(tiles_per_row * 1000, tiles_per_row, 2) % tiles_per_row == 0
            or tiles_per_row >= 1.5 * winograd.TILES_PER_BLOCK
        )
        assert (
            winograd.TILES_PER_BLOCK / 2
            < choose_block_tiles(tiles_per_row * 1000, tiles_per_row, 2)
            < 2 * winograd.TILES_PER_BLOCK
        )
    for tile_count, thread_count in itertools.product([1, 5, 16, 31, 33, 64], [1, 2, 7]):
        assert -(-tile_count // choose_block_tiles(tile_count, 1, thread_count)) >= min(tile_count, thread_count) / 2


@pytest.mark.parametrize("layout", [torch.contiguous_format, FORMAT])
def test_any_input_strides_are_accepted(layout):
    layer = winograd.WinogradConvolution(make_convolution(16, 16))
    x = torch.randn(1, 16, 6, 7, 8)
    assert torch.equal(layer(x), layer(x.to(memory_format=layout)))
    wide_image = torch.randn(1, 16, 6, 7, 16)
    assert torch.equal(layer(wide_image[..., ::2]), layer(wide_image[..., ::2].contiguous()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(16, 16, 1),
        nn.Conv3d(16, 16, 3),
        nn.Conv3d(16, 16, 3, padding=1, stride=2),
        nn.Conv3d(16, 16, 3, padding=2, dilation=2),
        nn.Conv3d(16, 16, 3, padding=1, groups=2),
        nn.Conv3d(16, 16, 3, padding=1, padding_mode="replicate"),
        nn.Conv3d(12, 16, 3, padding=1),
        nn.Conv3d(16, 24, 3, padding=1),
        nn.Conv3d(16, 16, 3, padding=1).double(),
        nn.Conv3d(16, 16, 3, padding=1).half(),
        nn.ConvTranspose3d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, padding=1),
    ],
)
def test_unsupported_layers_are_not_replaced(layer):
    assert not winograd.is_replaceable(layer)
    assert winograd.replace_convolutions(nn.Sequential(layer))[0].__class__ is layer.__class__


@pytest.mark.parametrize("dtype", winograd.SUPPORTED_DTYPES)
def test_following_activations_with_one_slope_are_fused(dtype):
    module = nn.Sequential(
        *(make_convolution(8, 16), nn.Sequential(nn.Identity(), nn.Dropout(), nn.ReLU())),
        *(make_convolution(16, 16), nn.LeakyReLU(0.125)),
        *(make_convolution(16, 16), nn.PReLU(init=0.5)),
        *(make_convolution(16, 16), nn.PReLU(16)),
        *(make_convolution(16, 16), nn.Sigmoid()),
        nn.ModuleDict({"a": make_convolution(16, 16)})["a"],
    )
    module = module.eval().to(dtype).requires_grad_(requires_grad=False)
    fast_module = winograd.replace_convolutions(module)
    layers = [child for child in fast_module if isinstance(child, winograd.WinogradConvolution)]
    assert [layer.slope for layer in layers] == [0.0, 0.125, 0.5, 1.0, 1.0, 1.0]
    unfused_types = [
        type(child) for child in fast_module.modules() if isinstance(child, nn.ReLU | nn.LeakyReLU | nn.PReLU)
    ]
    assert unfused_types == [nn.PReLU]
    assert winograd.count_replaceable(module) == 6, "the original module is unchanged"
    x = torch.randn(1, 8, 9, 9, 9).to(dtype)
    expected = copy.deepcopy(module).double()(x.double())
    assert (fast_module(x) - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_fake_operator_has_the_shape_and_strides_of_the_real_one():
    weights = winograd.pack_weights(make_convolution(8, 16).weight).values
    for bias, slope, dtype in itertools.product([None, torch.zeros(16)], [0.0, 1.0], winograd.SUPPORTED_DTYPES):
        x = torch.randn(1, 8, 5, 6, 7).to(dtype, memory_format=FORMAT)
        torch.library.opcheck(torch.ops.stackseg.convolve, (x, weights, bias, 16, slope))
