import copy

import pytest
import torch
from fakes import bind_to_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from service.engine.cpu import norm as norms
from service.engine.cpu.norm import ChannelsLastNorm, replace_norms
from service.engine.prepare import prepare

CPU = torch.device("cpu")


def randomize_weights(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    return norm.eval().requires_grad_(requires_grad=False)


def make_image(offset=0.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 12, 6, 7, 8, generator=generator) + offset
    return x.to(memory_format=torch.channels_last_3d)


def compute_in_float64(module, x):
    """Run the module in float64 with torch's own kernels."""
    return copy.deepcopy(module).double()(x.contiguous().double()).float()


NORMS = [
    nn.InstanceNorm3d(12),
    nn.InstanceNorm3d(12, affine=True),
    nn.GroupNorm(4, 12),
    nn.GroupNorm(1, 12, eps=0.1),
    nn.GroupNorm(12, 12, affine=False),
]


SLOPES = nn.PReLU(12)
SLOPES.weight.data = torch.linspace(-1, 1, 12)


@torch.inference_mode()
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("activation", [nn.Identity(), SLOPES], ids=repr)
@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("implementation", ["kernels", "torch", "traced"])
def test_results_match_the_original_norm_and_stay_channels_last(norm, activation, offset, implementation, monkeypatch):
    if implementation == "torch":
        monkeypatch.setattr(norms, "KERNELS", bind_to_variants(norms.KERNELS))
    network, x = nn.Sequential(randomize_weights(norm), activation), make_image(offset)
    fast_network = replace_norms(copy.deepcopy(network))
    y = (torch.compile(fast_network, fullgraph=True, backend="eager") if implementation == "traced" else fast_network)(
        x
    )
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    tolerance = 1e-5 if implementation == "kernels" else 1e-4
    torch.testing.assert_close(y, compute_in_float64(network, x), atol=tolerance, rtol=tolerance)


@settings(max_examples=30, deadline=None)
@given(
    size=st.tuples(st.integers(2, 13), st.integers(1, 13), st.integers(1, 13)),
    batch=st.integers(1, 3),
    groups=st.integers(1, 4),
    members=st.integers(1, 11),
    activation=st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.3), nn.PReLU(), nn.Identity()]),
    seed=st.integers(0, 2**31),
)
@torch.inference_mode()
def test_results_match_torch_for_any_shape(size, batch, groups, members, activation, seed):
    torch.manual_seed(seed)
    norm = randomize_weights(nn.GroupNorm(groups, groups * members))
    x = 3 * torch.randn(batch, groups * members, *size) + 20
    network = nn.Sequential(norm, nn.Dropout(), activation).eval()
    fast_network = replace_norms(copy.deepcopy(network))
    assert isinstance(fast_network[2], nn.Identity)
    torch.testing.assert_close(fast_network(x), compute_in_float64(network, x), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("channels", [3, 8, 16, 27, 35])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.3), nn.Identity()], ids=repr)
def test_kernel_rounds_to_bfloat16_once(channels, activation):
    norm = replace_norms(nn.Sequential(randomize_weights(nn.GroupNorm(1, channels)), activation)).bfloat16()
    x = torch.randn(2, channels, 5, 6, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1, channels - 1, 2, 3, 4] = torch.nan
    assert torch.equal(norm(x)[0], norm(x.float())[0].bfloat16())
    assert norm(x)[1].isnan().all()
    assert norm(x).is_contiguous(memory_format=torch.channels_last_3d)


def test_norms_with_running_statistics_and_torchscript_are_not_replaced():
    network = nn.Sequential(nn.InstanceNorm3d(4, track_running_stats=True), nn.BatchNorm3d(4), nn.ReLU())
    modules_before = list(network)
    assert list(replace_norms(network)) == modules_before
    script = torch.jit.script(nn.Sequential(nn.GroupNorm(4, 12)).eval())
    assert replace_norms(script) is script


def test_norms_are_replaced_only_with_channels_last():
    network = nn.Sequential(nn.Conv3d(1, 4, 1), nn.ModuleDict({"norm": nn.InstanceNorm3d(4)})["norm"])
    channels_last = prepare(network, CPU, torch.float32, torch.channels_last_3d)
    contiguous = prepare(network, CPU, torch.float32, torch.contiguous_format)
    assert sum(isinstance(module, ChannelsLastNorm) for module in channels_last.modules()) == 1
    assert not any(isinstance(module, ChannelsLastNorm) for module in contiguous.modules())
    assert isinstance(network[1], nn.InstanceNorm3d)
