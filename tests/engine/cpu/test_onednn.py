"""Tests that packed convolutions give the same results as torch's own."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from service.engine.cpu import onednn, strided_conv

FORMAT = torch.channels_last_3d
SIZE = (7, 10, 9)
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN does not support BF16 on this processor"
    ),
)
DTYPES = [torch.float32, BFLOAT16]
# Relative to the largest result: float32 sums are computed in a different order, and BF16 results are rounded once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}

FUSED_ACTIVATIONS = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.3), nn.LeakyReLU(0.0), nn.LeakyReLU(-0.2)),
    *(nn.PReLU(init=0.2), nn.PReLU(init=0.0), nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")),
]
UNFUSED_ACTIVATIONS = [nn.ReLU6(), nn.Hardtanh(), nn.PReLU(16, init=0.2), nn.ELU(), nn.Tanh()]

LAYERS = [
    nn.Conv3d(8, 16, 3, padding=1),
    nn.Conv3d(1, 16, 3, padding=1),
    nn.Conv3d(8, 16, 1, bias=False),
    nn.Conv3d(8, 16, 2, stride=2),
    nn.Conv3d(8, 16, (3, 1, 5), padding=(1, 0, 2), stride=(1, 2, 1)),
    nn.Conv3d(8, 16, 3, padding=2, dilation=2),
    nn.Conv3d(8, 16, 3, padding=1, groups=4),
    nn.Conv3d(8, 16, (3, 1, 5), padding="same", dilation=(2, 1, 1)),
    nn.Conv3d(8, 16, 3, padding="valid"),
    nn.ConvTranspose3d(8, 16, 2, stride=2),
    nn.ConvTranspose3d(8, 4, 3, stride=(2, 1, 2), padding=1, output_padding=(1, 0, 1), bias=False),
]


def make_plain_and_packed(layer, activation, dtype):
    """Return the layer and its activation with weights rounded to `dtype`, in float32 and packed in `dtype`."""
    sequence = copy.deepcopy(nn.Sequential(layer, *([activation] if activation else []))).eval()
    sequence.requires_grad_(requires_grad=False)
    rounded_sequence = sequence.to(dtype)
    return copy.deepcopy(rounded_sequence).float(), onednn.pack_convolutions(rounded_sequence)


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.LeakyReLU(0.3), nn.PReLU()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_packed_layer_matches_the_original(layer, activation, dtype):
    plain_layer, packed_layer = make_plain_and_packed(layer, activation, dtype)
    assert isinstance(packed_layer[0], onednn.PackedConvolution | strided_conv.StridedConvolution)
    # The weights are packed for the first batch. Other shapes must work too.
    for batch, size in ((2, SIZE), (1, SIZE), (3, (5, 8, 12))):
        x = torch.randn(batch, layer.in_channels, *size).to(dtype)
        expected = plain_layer(x.float())
        for image in (x, x.to(memory_format=FORMAT)):
            scores = packed_layer(image)
            assert scores.dtype == dtype
            assert scores.stride(1) == 1, "channels last, even for one input channel"
            assert (scores.float() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize("activation", FUSED_ACTIVATIONS + UNFUSED_ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_activation_is_fused_only_if_the_result_stays_the_same(activation, dtype):
    plain_layer, packed_layer = make_plain_and_packed(nn.Conv3d(8, 16, 3), activation, dtype)
    assert isinstance(packed_layer[1], nn.Identity) == (activation in FUSED_ACTIVATIONS)
    x = 4 * torch.randn(2, 8, *SIZE).to(dtype)
    expected = plain_layer(x.float())
    # An activation that is not fused rounds a second time.
    assert (packed_layer(x).float() - expected).abs().max() <= 2 * TOLERANCES[dtype] * expected.abs().max()


@torch.inference_mode()
def test_negative_values_after_a_fused_relu_vanish_in_sums():
    packed_layer = onednn.pack_convolutions(nn.Sequential(nn.Conv3d(8, 16, 3), nn.ReLU()))
    scores = packed_layer(100 * torch.randn(2, 8, *SIZE))
    negative_values = scores[scores < 0]
    assert negative_values.numel() > 0
    assert torch.equal(negative_values + 1e-20, torch.full_like(negative_values, 1e-20))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(8, 16, 3, padding=1, padding_mode="replicate"),
        nn.Conv3d(8, 16, 3, padding=1).double(),
        nn.Conv3d(8, 16, 2, padding="same"),
        nn.ConvTranspose3d(8, 16, 2, stride=2, groups=2),
        nn.Conv2d(8, 16, 3),
        nn.Linear(8, 16),
    ],
    ids=repr,
)
def test_unsupported_layers_are_not_replaced(layer):
    assert onednn.pack_convolutions(nn.Sequential(layer))[0] is layer


@torch.inference_mode()
def test_original_weights_are_released_after_packing():
    layer = onednn.PackedConvolution(nn.Conv3d(8, 16, 3), onednn.Activation())
    layer(torch.randn(1, 8, 5, 5, 5))
    assert sum(tensor.numel() for tensor in layer.state_dict().values()) == 16, "only the bias"


@pytest.mark.parametrize("activation", FUSED_ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[1], LAYERS[2], LAYERS[3], LAYERS[6], LAYERS[9]], ids=repr)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_non_finite_values_reach_the_result(activation, dtype, layer, value):
    plain_layer, packed_layer = make_plain_and_packed(layer, activation, dtype)
    assert isinstance(packed_layer[1], nn.Identity)
    x = torch.zeros(2, layer.in_channels, *SIZE).to(dtype)
    x[0, 0, 3, 5, 5] = value
    assert not torch.isfinite(packed_layer(x).sum())
    if value != value:
        assert packed_layer(x).isnan()[plain_layer(x.float()).isnan()].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_results_do_not_depend_on_batch_size(dtype):
    _, packed_layer = make_plain_and_packed(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), dtype)
    x = torch.randn(3, 8, *SIZE).to(dtype)
    assert torch.equal(packed_layer(x)[:1], packed_layer(x[:1]))


OLD_PROCESSOR_PROGRAM = """
import torch
from torch import nn
from service.engine.cpu import onednn
wide, narrow = nn.Conv3d(8, 16, 3), nn.Conv3d(8, 16, 3).bfloat16()
module = onednn.pack_convolutions(nn.Sequential(wide, nn.ReLU(), narrow)).requires_grad_(requires_grad=False)
assert isinstance(module[0], onednn.PackedConvolution) and module[2] is narrow
x = torch.zeros(2, 8, 5, 5, 5)
x[0, 0, 2, 2, 2] = float("nan")
assert module[:2](x)[0].isnan().all()
"""


@pytest.mark.parametrize("features", ["SSE41", "AVX2"])
def test_only_float32_is_packed_without_bf16_support_in_onednn(features):
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": features}
    subprocess.run([sys.executable, "-c", OLD_PROCESSOR_PROGRAM], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first_bias", [-0.3, -100.0], ids=["some activations", "no activations"])
@torch.inference_mode()
def test_relu_before_the_scores_keeps_exact_zeros(bias, first_bias):
    torch.manual_seed(0)
    layers = [nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 3, 1, bias=bias), nn.ReLU(), nn.Dropout()]
    network = nn.Sequential(*layers)
    network = network.eval().requires_grad_(requires_grad=False)
    network[0].bias.fill_(first_bias)
    x = torch.randn(1, 8, *SIZE)
    expected = network(x)
    assert (expected.amax(1) == 0).any() or (bias and first_bias == -100.0)
    packed_layer = onednn.pack_convolutions(network, returns_scores=True)
    assert isinstance(packed_layer[1], nn.Identity) == bias
    assert torch.equal(packed_layer(x) == 0, expected == 0)
