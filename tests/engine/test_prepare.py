import copy

import pytest
import torch
from monai.networks.nets.unet import UNet
from torch import nn

from service.engine.prepare import fold_batch_norms, prepare
from service.models.architectures.shuffle_unet import ShuffleUNet

CPU = torch.device("cpu")


def randomize_norms(network: nn.Module) -> nn.Module:
    """Randomize the running statistics and weights of all batch norms."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.running_mean.uniform_(-1, 1, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
                nn.init.uniform_(module.bias, -1, 1, generator=generator)
    return network.eval()


def count_norms(network: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm3d) for module in network.modules())


@pytest.fixture(scope="module")
def shuffle_unet() -> nn.Module:
    torch.manual_seed(0)
    return randomize_norms(ShuffleUNet(1, 2, (4, 6)))


def monai_unet(*channels) -> nn.Module:
    strides = (2,) * (len(channels) - 1)
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=channels, strides=strides, norm="BATCH")


@torch.inference_mode()
@pytest.mark.parametrize(
    "make",
    [
        lambda: ShuffleUNet(1, 2, (4, 6)),
        lambda: nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3, affine=False)),
        # Nested sequences with both kinds of convolutions.
        lambda: monai_unet(4, 6, 8),
    ],
    ids=["ShuffleUNet", "without weights", "UNet"],
)
def test_folding_removes_all_norms_and_preserves_the_scores(make):
    network, x = randomize_norms(make()), torch.rand(2, 1, 8, 8, 8)
    assert count_norms(network) > 0
    folded_network = fold_batch_norms(copy.deepcopy(network))
    assert count_norms(folded_network) == 0
    torch.testing.assert_close(folded_network(x), network(x), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU(), nn.BatchNorm3d(2)),
        nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2, track_running_stats=False)),
        nn.Sequential(nn.ConvTranspose3d(2, 2, 1, groups=2), nn.BatchNorm3d(2)),
        nn.Sequential(nn.Conv3d(1, 2, 1), nn.Sequential(nn.ReLU(), nn.BatchNorm3d(2))),
        nn.ModuleDict({"conv": nn.Conv3d(1, 2, 1), "norm": nn.BatchNorm3d(2)}),
    ],
)
def test_norms_that_cannot_be_folded_are_not_changed(network):
    assert count_norms(fold_batch_norms(network)) == 1


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("memory_format", [torch.channels_last_3d, torch.contiguous_format])
def test_prepared_networks_return_the_same_scores_as_float32(shuffle_unet, dtype, tolerance, memory_format):
    x = torch.rand(2, 1, 8, 8, 8)
    expected = shuffle_unet(x)
    scores = prepare(shuffle_unet, CPU, dtype, memory_format)(x.to(dtype))
    assert scores.dtype == torch.float32
    assert (scores - expected).abs().max() < tolerance * expected.abs().max()
    assert torch.equal(shuffle_unet(x), expected), "the original network is unchanged"


@pytest.mark.parametrize("memory_format", [torch.channels_last_3d, torch.contiguous_format])
def test_weights_are_converted_to_dtype_and_memory_format(memory_format):
    prepared_network = prepare(monai_unet(8, 16), CPU, torch.bfloat16, memory_format)
    convolutions = [parameter for parameter in prepared_network.parameters() if parameter.dim() == 5]
    assert convolutions
    assert all(parameter.is_contiguous(memory_format=memory_format) for parameter in convolutions)
    assert {tensor.dtype for tensor in prepared_network.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in prepared_network.parameters())
    assert not any(module.training for module in prepared_network.modules())
