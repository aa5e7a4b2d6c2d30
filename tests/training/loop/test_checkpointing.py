import copy
from typing import Any

import pytest
import torch
from torch import nn

from service.models.architectures.build import build_network
from service.models.spec import Architecture
from service.training.loop.checkpointing import checkpoint_blocks, find_blocks

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
