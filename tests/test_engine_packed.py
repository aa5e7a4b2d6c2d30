"""Packed convolutions against torch's own."""

import pytest
import torch
from torch import nn

from service.engine import packed

FORMAT = torch.channels_last_3d
SIZE = (7, 10, 9)

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


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.LeakyReLU(0.3)], ids=repr)
@torch.inference_mode()
def test_it_computes_what_the_layer_does(layer, activation):
    plain = nn.Sequential(layer, *([activation] if activation else [])).eval()
    fast = packed.pack(nn.Sequential(*plain))
    assert isinstance(fast[0], packed.Convolution)
    assert not isinstance(activation, nn.LeakyReLU) or isinstance(fast[1], nn.Identity)
    # The weights are laid out for the first batch; others are computed as well.
    for batch in (2, 1, 3):
        x = torch.randn(batch, layer.in_channels, *SIZE)
        for given in (x, x.to(memory_format=FORMAT)):
            scores = fast(given)
            assert scores.stride(1) == 1, "channels last, even from one channel"
            torch.testing.assert_close(scores, plain(x), rtol=1e-5, atol=1e-5)


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
def test_what_it_cannot_compute_is_left_alone(layer):
    assert packed.pack(nn.Sequential(layer))[0] is layer


def test_only_what_follows_in_a_sequence_is_taken_in():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv3d(2, 2, 1), nn.LeakyReLU()

        def forward(self, x):
            return self.two(-x) + self.one(x)

    module = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Dropout(), nn.Sequential(nn.LeakyReLU(), Other())).eval()
    x = torch.randn(1, 1, 4, 4, 4)
    with torch.inference_mode():
        expected = module(x)
        fast = packed.pack(module)
        assert isinstance(fast[2][0], nn.Identity)
        assert isinstance(fast[2][1].two, nn.LeakyReLU)
        torch.testing.assert_close(fast(x), expected)


@torch.inference_mode()
def test_weights_are_kept_once():
    layer = packed.Convolution(nn.Conv3d(8, 16, 3), packed.Activation())
    layer(torch.randn(1, 8, 5, 5, 5))
    assert sum(tensor.numel() for tensor in layer.state_dict().values()) == 16, "the bias alone"


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU(0.0)], ids=repr)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_a_value_that_is_not_finite_is_not_lost(activation, value):
    fast = packed.pack(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), activation))
    x = torch.zeros(1, 1, 4, 4, 4)
    x[0, 0, 1, 1, 1] = value
    assert not torch.isfinite(fast(x).sum())
