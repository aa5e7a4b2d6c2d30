import pytest
import torch
from torch import nn

from service.engine.norms import ChannelsLastNorm, lay_out
from service.engine.prepare import prepare

CPU = torch.device("cpu")


def with_weights(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    return norm.eval().requires_grad_(requires_grad=False)


def image(offset=0.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 12, 6, 7, 8, generator=generator) + offset
    return x.to(memory_format=torch.channels_last_3d)


NORMS = [
    nn.InstanceNorm3d(12),
    nn.InstanceNorm3d(12, affine=True),
    nn.GroupNorm(4, 12),
    nn.GroupNorm(1, 12, eps=0.1),
    nn.GroupNorm(12, 12, affine=False),
]


@torch.inference_mode()
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_scores_are_those_of_the_norm_and_channels_stay_last(norm, offset):
    with_weights(norm)
    x = image(offset)
    y = lay_out(nn.Sequential(norm))(x)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(y, norm.double()(x.contiguous().double()).float(), atol=1e-4, rtol=1e-4)
    norm.float()


@torch.inference_mode()
@pytest.mark.parametrize("norm", [nn.InstanceNorm3d(12, affine=True), nn.GroupNorm(4, 12)], ids=str)
def test_a_narrow_dtype_stays_and_is_summed_in_float32(norm):
    with_weights(norm)
    x = image(offset=5.0).bfloat16()
    y = lay_out(nn.Sequential(norm))(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), norm(x.float()), atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_traced_it_computes_the_same():
    norm = with_weights(nn.GroupNorm(4, 12))
    x = image(offset=50.0)
    network = torch.compile(lay_out(nn.Sequential(norm)), fullgraph=True, backend="eager")
    torch.testing.assert_close(network(x), norm.double()(x.contiguous().double()).float(), atol=1e-4, rtol=1e-4)


def test_norms_with_running_statistics_and_other_modules_stay():
    network = nn.Sequential(nn.InstanceNorm3d(4, track_running_stats=True), nn.BatchNorm3d(4), nn.ReLU())
    before = list(network)
    assert list(lay_out(network)) == before


def test_they_are_replaced_where_channels_are_last_only():
    network = nn.Sequential(nn.Conv3d(1, 4, 1), nn.ModuleDict({"norm": nn.InstanceNorm3d(4)})["norm"])
    last = prepare(network, CPU, torch.float32, torch.channels_last_3d)
    first = prepare(network, CPU, torch.float32, torch.contiguous_format)
    assert sum(isinstance(module, ChannelsLastNorm) for module in last.modules()) == 1
    assert not any(isinstance(module, ChannelsLastNorm) for module in first.modules())
    assert isinstance(network[1], nn.InstanceNorm3d)


def test_programs_are_left_as_they_are():
    program = torch.jit.script(nn.Sequential(nn.GroupNorm(4, 12)).eval())
    assert lay_out(program) is program
