import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.models.architectures import build_network
from service.models.spec import Architecture
from service.training.techniques import checkpoint_blocks, find_blocks, make_convolutions_safe, measure_statistics

IMAGES = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
TINY: dict[str, dict[str, Any]] = {
    "ShuffleUNet": {"in_channels": 1, "out_channels": 2, "widths": [4, 8]},
    "UNet": IMAGES | {"channels": [4, 8], "strides": [2], "num_res_units": 2, "norm": "batch", "dropout": 0.2},
    "DynUNet": IMAGES
    | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 6, 8]}
    | {"norm_name": "batch"},
}


def trained(network: nn.Module) -> tuple[float, int]:
    """Loss of one step, whose gradients stay in the network, and the bytes kept for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    image = torch.rand(1, 1, 16, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(image).square().mean()
    loss.backward()
    return float(loss.detach()), sum(kept.values())


@pytest.mark.parametrize("name", TINY)
def test_a_step_is_the_same_and_keeps_less(name: str) -> None:
    torch.manual_seed(0)
    plain = build_network(Architecture(name=name, arguments=TINY[name])).train()
    again = copy.deepcopy(plain)
    assert checkpoint_blocks(again) == len(set(find_blocks(plain))) > 1, "shared blocks, as of the DynUNet, count once"
    (loss, kept), (same_loss, less) = trained(plain), trained(again)
    assert same_loss == loss
    assert less < 0.7 * kept
    for (parameter, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=parameter)
    statistics = zip(plain.named_buffers(), again.buffers(), strict=True)
    assert all(torch.equal(one, other) for (_, one), other in statistics)


def test_batch_statistics_are_plain_means_over_the_batches() -> None:
    norm = torch.nn.BatchNorm3d(1).eval()
    norm.running_mean.fill_(7)
    batches = torch.rand(5, 2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(3)).unbind()
    measure_statistics(norm, batches)
    assert float(norm.running_mean) == pytest.approx(np.mean([float(images.mean()) for images in batches]), abs=1e-5)
    assert not norm.training
    assert norm.momentum == torch.nn.BatchNorm3d(1).momentum


@pytest.mark.parametrize(("planes", "kernel"), [(1, 3), (2, 3), (3, 3), (4, 5), (8, 3)])
def test_gradients_in_bfloat16_are_those_of_float32(planes: int, kernel: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv3d(32, 32, kernel, padding=kernel // 2, bias=False)
    usual = nn.Conv3d(32, 32, kernel, padding=kernel // 2, bias=False)
    usual.load_state_dict(layer.state_dict())
    make_convolutions_safe(layer)
    for _ in range(5):
        image = torch.randn(2, 32, planes, 4, 4)
        upper = torch.randn(2, 32, planes, 4, 4)
        for module, enabled in ((layer, True), (usual, False)):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                scores = module(image)
            scores.float().backward(upper)
        assert layer.weight.grad is not None
        assert usual.weight.grad is not None
        error = (layer.weight.grad - usual.weight.grad).abs().max()
        assert error < 0.02 * usual.weight.grad.abs().max()
