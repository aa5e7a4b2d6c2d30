"""Tests of kernel calls, and of properties shared by all layers that use the kernels."""

import copy
import itertools
import threading

import pytest
import torch
from fakes import bind_to_variants
from torch import nn

from service.core.native.variants import list_supported_variants
from service.engine.cpu import graph, norm, pixel_shuffle, strided_conv, winograd
from service.engine.cpu.kernel_call import SUPPORTED_DTYPES, KernelCall, observe_calls
from service.engine.cpu.norm import replace_norms

# Relative to the largest result: float32 sums are computed in a different order, and BF16 results are rounded once.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2.0**-8}

LAYERS = {
    "winograd": lambda: nn.Conv3d(24, 48, 3, padding=1),
    "strided": lambda: nn.Conv3d(24, 44, 2, stride=2),
    "transposed": lambda: nn.ConvTranspose3d(24, 44, 2, stride=2),
    "norm": lambda: nn.GroupNorm(2, 24),
}
CONVOLUTIONS = [kind for kind in LAYERS if kind != "norm"]


def make_plain_and_fast(kind, slope=1.0, dtype=torch.float32, bias=None):
    """Return a torch layer followed by a leaky ReLU, and its equivalent with StackSeg's kernels."""
    torch.manual_seed(0)
    plain_layer = nn.Sequential(LAYERS[kind](), nn.LeakyReLU(slope)).to(dtype).requires_grad_(requires_grad=False)
    if bias is not None:
        plain_layer[0].bias.fill_(bias)
    if kind == "norm":
        return plain_layer, replace_norms(copy.deepcopy(plain_layer))
    layer = winograd.WinogradConvolution if kind == "winograd" else strided_conv.StridedConvolution
    return plain_layer, layer(plain_layer[0], slope)


@pytest.fixture(params=list_supported_variants(), ids=lambda variant: variant.name)
def variant(request, monkeypatch):
    """Use the kernels compiled for one kind of processor."""
    for module in (norm, strided_conv, winograd):
        monkeypatch.setattr(module, "KERNELS", bind_to_variants(module.KERNELS, request.param))


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("kind", LAYERS)
@torch.inference_mode()
def test_every_processor_variant_matches_torch(kind):
    for dtype in SUPPORTED_DTYPES:
        plain_layer, fast_layer = make_plain_and_fast(kind, 0.0, dtype)
        x = torch.randn(2, 24, 6, 10, 14).to(dtype)
        expected, y = copy.deepcopy(plain_layer).double()(x.double()), fast_layer(x)
        assert (y - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    if kind in {"winograd", "norm"}:
        # Weights are float32 for any dtype of the image.
        assert torch.equal(y, fast_layer(x.float()).bfloat16())


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@torch.inference_mode()
def test_non_finite_values_reach_the_result(kind, value, slope, dtype):
    plain_layer, fast_layer = make_plain_and_fast(kind, slope, dtype)
    x = torch.zeros(2, 24, 4, 4, 6, dtype=dtype)
    x[1, 5, 1, 2, 3] = value
    y, expected_nan = fast_layer(x), plain_layer.float()(x.float()).isnan()
    assert not torch.isfinite(y.sum())
    assert not y[0].isnan().any()
    if value != value:
        # Winograd's algorithm spreads a NaN over a whole tile.
        assert y.isnan()[expected_nan].all() if kind == "winograd" else torch.equal(y.isnan(), expected_nan)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize(("slope", "expected"), [(0.0, 0.0), (0.1, -torch.inf), (1.0, -torch.inf)])
@torch.inference_mode()
def test_activations_of_negative_infinity(kind, slope, expected, dtype):
    _, fast_layer = make_plain_and_fast(kind, slope, dtype, bias=-torch.inf)
    assert (fast_layer(torch.ones(1, 24, 4, 4, 4, dtype=dtype)) == expected).all()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@torch.inference_mode()
def test_results_do_not_depend_on_batch_size_or_threads(kind, dtype):
    _, fast_layer = make_plain_and_fast(kind, 0.0, dtype)
    x = torch.randn(3, 24, 20, 20, 20).to(dtype)
    thread_count_before, scores = torch.get_num_threads(), fast_layer(x)
    try:
        for thread_count, window_count in itertools.product((1, 2, 3), repeat=2):
            torch.set_num_threads(thread_count)
            assert torch.equal(fast_layer(x[:window_count]), scores[:window_count])
    finally:
        torch.set_num_threads(thread_count_before)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_wrong_channels_or_dtypes_are_rejected_and_empty_images_give_empty_results(kind):
    _, fast_layer = make_plain_and_fast(kind)
    for size in ((0, 24, 4, 4, 4), (1, 24, 0, 4, 4)):
        assert fast_layer(torch.zeros(size)).numel() == 0
    for channels in (8, 25, 48):
        with pytest.raises(RuntimeError, match="not match the weights"):
            fast_layer(torch.zeros(1, channels, 4, 4, 4))
    with pytest.raises(TypeError if kind == "winograd" else RuntimeError, match="float16"):
        fast_layer(torch.zeros(1, 24, 4, 4, 4).half())


@pytest.mark.parametrize(
    ("module", "build"),
    [
        (winograd, lambda: make_plain_and_fast("winograd")),
        (strided_conv, lambda: make_plain_and_fast("strided")),
        (pixel_shuffle, lambda: pixel_shuffle.SpaceToDepth((2, 2, 2))),
        (graph, lambda: graph.CpuGraph(nn.Identity(), torch.zeros(1, 1, 2, 2, 2))),
    ],
    ids=["winograd", "strided", "shuffle", "graph"],
)
def test_missing_kernels_raise_an_error_with_the_reason(monkeypatch, module, build):
    monkeypatch.setattr(module, "KERNELS", bind_to_variants(module.KERNELS))
    with pytest.raises(OSError, match="AVX2"):
        build()


def shuffle(x):
    return pixel_shuffle.SpaceToDepth((2, 2, 2))(x)


def test_observe_calls_reports_only_calls_in_this_thread_within_the_context():
    calls = list[KernelCall]()
    x = torch.randn(2, 1, 4, 6, 8)
    shuffle(x)
    with observe_calls(calls.append):
        y = shuffle(x)
        thread = threading.Thread(target=shuffle, args=(x,))
        thread.start()
        thread.join()
    shuffle(x)
    (call,) = calls
    assert call.kernel == "stackseg_space_to_depth"
    assert (call.inputs[0].data_ptr(), call.output.data_ptr()) == (x.data_ptr(), y.data_ptr())
    assert call.sizes == (2, 1, 2, 3, 4, 2, 2, 2, 4)
