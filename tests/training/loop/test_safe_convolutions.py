import pytest
import torch
from torch import nn

from service.training.loop.safe_convolutions import make_convolutions_safe


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
