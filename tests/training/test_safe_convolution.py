from __future__ import annotations

import pytest
import torch
from torch import nn

from service.training.safe_convolution import make_convolutions_safe


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
