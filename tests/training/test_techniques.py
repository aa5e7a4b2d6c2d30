import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.models.architectures.build import build_network
from service.models.spec import Architecture
from service.training.techniques import (
    checkpoint_blocks,
    find_blocks,
    make_convolutions_safe,
    recompute_statistics,
    update_average,
)

IO_CHANNELS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
NETWORKS: dict[str, dict[str, Any]] = {
    "ShuffleUNet": {"in_channels": 1, "out_channels": 2, "widths": [4, 8]},
    "UNet": IO_CHANNELS | {"channels": [4, 8], "strides": [2], "num_res_units": 2, "norm": "batch", "dropout": 0.2},
    "DynUNet": IO_CHANNELS
    | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 6, 8]}
    | {"norm_name": "batch"},
}


def run_step(network: nn.Module) -> tuple[float, int]:
    """Run one step. Return the loss and the bytes saved for the backward pass. The gradients stay in the network."""
    saved_bytes: dict[int, int] = {}

    def record_tensor(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    image = torch.rand(1, 1, 16, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(record_tensor, lambda tensor: tensor):
        loss = network(image).square().mean()
    loss.backward()
    return float(loss.detach()), sum(saved_bytes.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_checkpointed_step_is_equal_and_saves_fewer_bytes(name: str) -> None:
    torch.manual_seed(0)
    reference = build_network(Architecture(name=name, arguments=NETWORKS[name])).train()
    checkpointed = copy.deepcopy(reference)
    assert checkpoint_blocks(checkpointed) == len(set(find_blocks(reference))) > 1, (
        "shared blocks, such as those of DynUNet, count once"
    )
    (loss, saved_bytes), (checkpointed_loss, checkpointed_bytes) = run_step(reference), run_step(checkpointed)
    assert checkpointed_loss == loss
    assert checkpointed_bytes < 0.7 * saved_bytes
    for (parameter, expected), actual in zip(reference.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=parameter)
    statistics = zip(reference.named_buffers(), checkpointed.buffers(), strict=True)
    assert all(torch.equal(expected, actual) for (_, expected), actual in statistics)


def test_batch_statistics_are_plain_means_over_batches() -> None:
    norm = torch.nn.BatchNorm3d(1).eval()
    norm.running_mean.fill_(7)
    batches = torch.rand(5, 2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(3)).unbind()
    recompute_statistics(norm, batches)
    assert float(norm.running_mean) == pytest.approx(np.mean([float(images.mean()) for images in batches]), abs=1e-5)
    assert not norm.training
    assert norm.momentum == torch.nn.BatchNorm3d(1).momentum


@pytest.mark.parametrize(("plane_count", "kernel_size"), [(1, 3), (2, 3), (3, 3), (4, 5), (8, 3)])
def test_bfloat16_gradients_match_float32(plane_count: int, kernel_size: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv3d(32, 32, kernel_size, padding=kernel_size // 2, bias=False)
    reference = nn.Conv3d(32, 32, kernel_size, padding=kernel_size // 2, bias=False)
    reference.load_state_dict(layer.state_dict())
    make_convolutions_safe(layer)
    for _ in range(5):
        image = torch.randn(2, 32, plane_count, 4, 4)
        gradient = torch.randn(2, 32, plane_count, 4, 4)
        for module, is_enabled in ((layer, True), (reference, False)):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
                scores = module(image)
            scores.float().backward(gradient)
        assert layer.weight.grad is not None
        assert reference.weight.grad is not None
        error = (layer.weight.grad - reference.weight.grad).abs().max()
        assert error < 0.02 * reference.weight.grad.abs().max()


def test_averaged_statistics_change_more_slowly_than_those_of_the_network() -> None:
    network = nn.BatchNorm3d(1)
    copied, averaged = copy.deepcopy(network), copy.deepcopy(network)
    network.running_mean.fill_(1)
    network.num_batches_tracked.fill_(5)
    update_average(copied, network, 0.9)
    update_average(averaged, network, 0.9, 0.75)
    assert (copied.running_mean.item(), averaged.running_mean.item()) == (1, 0.25)
    assert averaged.num_batches_tracked == 5
