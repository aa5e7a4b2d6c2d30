"""Captured networks against the same, layer by layer."""

import ctypes
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from service.core.buffers import BufferPool
from service.engine.cpu import graph as cpu_graph
from service.engine.cpu import onednn, winograd
from service.engine.cpu.graph import CpuGraph
from service.engine.prepare import prepare
from service.models.architectures import ShuffleUNet

FORMAT = torch.channels_last_3d
DTYPES = [torch.bfloat16, torch.float32]


class Residual(nn.Module):
    """A network of MONAI's shape: norms of instances, sums of two ways, strided and transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(8, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.PReLU())
        self.way = nn.Conv3d(8, 16, 1)
        self.down = nn.Sequential(nn.Conv3d(16, 32, 2, stride=2), nn.GroupNorm(4, 32), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose3d(32, 16, 2, stride=2)
        self.last = nn.Conv3d(16, 8, 1)

    def forward(self, x):
        top = self.first(x) + self.way(x)
        scores = self.up(self.down(top))
        scores += top
        return self.last(scores)


def ready(network, dtype=torch.float32):
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    own = prepare(network, torch.device("cpu"), dtype, FORMAT)
    return onednn.pack(winograd.replace_convolutions(own).network)


def batch(channels, windows=3, dtype=torch.float32, size=(8, 16, 24)):
    return torch.randn(windows, channels, *size).to(dtype).to(memory_format=FORMAT)


@pytest.fixture
def captured():
    """A module, a batch, and the module captured for such batches."""
    module, x = ready(ShuffleUNet(1, 2, (16, 32))), batch(1)
    return module, x, CpuGraph(module, x)


NETWORKS = [(lambda: ShuffleUNet(1, 2, (16, 32)), 1), (lambda: ShuffleUNet(2, 3, (16, 16, 32)), 2), (Residual, 8)]


@pytest.mark.parametrize(("make", "channels"), NETWORKS, ids=["one channel", "two channels", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_scores_are_those_of_the_module_to_the_bit(make, channels, dtype):
    module, x = ready(make(), dtype), batch(channels, dtype=dtype)
    if channels == 2:
        # Folded, as ATen would convert it first.
        x = x.contiguous()
    captured = CpuGraph(module, x)
    before = torch.get_num_threads()
    try:
        for threads, windows in itertools.product((1, 2), (1, 2, 3)):
            torch.set_num_threads(threads)
            part = torch.randn_like(x)[:windows]
            scores, expected = captured(part), module(part)
            assert torch.equal(scores, expected)
            assert scores.stride() == expected.stride()
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_it_does_not_come_back_to_python(captured):
    module, x, graph = captured
    expected = module(x)
    module.forward = None
    assert torch.equal(graph(x), expected)


@torch.inference_mode()
def test_weights_stay_as_long_as_the_tape():
    module, x = ready(Residual(), torch.bfloat16), batch(8, dtype=torch.bfloat16)
    played, expected = cpu_graph.capture_graph(module, x), module(x)
    del module
    gc.collect()
    # What was freed would be written to.
    rest = [torch.full((1024 * size,), torch.nan) for size in range(1, 100)]
    arena = cpu_graph.Arena(played.arena)
    arena.memory.fill_(255)
    assert torch.equal(played.replay(x, arena, BufferPool(played.nbytes, 0)), expected)
    assert rest


@torch.inference_mode()
def test_scores_last_and_nothing_is_left_of_earlier_calls(captured):
    module, x, graph = captured
    first, kept = graph(x), module(x)
    bad = x.clone()
    bad[0, 0, 3, 4, 5] = torch.nan
    assert graph(bad)[0].isnan().any()
    assert torch.equal(graph(bad)[1:], kept[1:])
    assert torch.equal(graph(x), kept)
    assert torch.equal(first, kept)


@torch.inference_mode()
def test_memory_of_scores_serves_again_once_nobody_looks_at_them(captured):
    """Also for batches of other lengths; and no more of it waits than may be kept."""
    _module, x, graph = captured
    scores = graph(x)
    place, part = scores.data_ptr(), scores[1:]
    expected = part.clone()
    del scores
    assert graph(x[:1]).data_ptr() != place
    assert torch.equal(part, expected)
    del part
    assert graph(x[:1]).data_ptr() == place


@torch.inference_mode()
def test_threads_do_not_disturb_each_other(captured):
    module, x, graph = captured
    inputs = [torch.randn_like(x) for _ in range(4)]
    expected = [module(each) for each in inputs]

    @torch.inference_mode()
    def run(index):
        return all(torch.equal(graph(inputs[index]), expected[index]) for _ in range(20))

    with ThreadPoolExecutor(4) as crew:
        assert all(crew.map(run, range(4)))


@torch.inference_mode()
def test_what_it_was_not_made_for_goes_through_the_module():
    module, strided = ready(ShuffleUNet(1, 2, (16, 32))), torch.randn(3, 1, 8, 16, 48)[..., ::2]
    # Examples with gaps are no promise for batches like them.
    for captured in (CpuGraph(module, batch(1)), CpuGraph(module, strided[:2])):
        for other in (batch(1, 4), batch(1, size=(16, 16, 16)), strided, strided[:2], strided[..., :16]):
            assert torch.equal(captured(other), module(other))


class Other(nn.Module):
    """Does something with what a convolution gives."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Conv3d(8, 16, 3, padding=1), what
        self.scale = nn.Parameter(torch.randn(1))
        self.script, self.up = torch.jit.script(nn.Sigmoid()), nn.ConvTranspose3d(16, 16, 2, stride=2)

    def forward(self, x):
        return self.what(self, self.layer(x), x)


def unseen(x):
    """A copy that no operator of ATen makes."""
    floats = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    return torch.frombuffer(bytearray(floats), dtype=x.dtype).as_strided(x.shape, x.stride())


CANNOT = {
    "an operator": lambda _, y, _x: y.sigmoid(),
    "in place": lambda _, y, _x: y.mul_(2),
    "another sum": lambda _, y, _x: y + 1,
    "a scaled sum": lambda _, y, _x: torch.add(y, y, alpha=2),
    "a sum that broadcasts": lambda _, y, _x: y + y[:1],
    "random numbers": lambda _, y, _x: y + torch.rand_like(y),
    "a look at values": lambda _, y, x: y if y.sum().item() > 0 else x,
    "a part": lambda _, y, _x: y[:, :8],
    "its input": lambda _, _y, x: x,
    "nothing": lambda _, _y, x: torch.empty_like(x),
    "a sum with nothing": lambda _, y, _x: torch.empty_like(y).add_(y),
    "a constant": lambda _, y, _x: torch.zeros_like(y),
    "several": lambda _, y, _x: (y, y),
    "a convolution of oneDNN's": lambda _, y, _x: nn.functional.conv3d(y, torch.ones(1, 16, 3, 3, 3)),
    "a look from outside": lambda _, y, x: y if x.numpy().mean() < 1 else x,
    "a list": lambda _, y, x: y if x.tolist() else x,
    "what nobody sees": lambda _, y, x: y.add_(unseen(x).repeat(1, 2, 1, 1, 1).to(memory_format=FORMAT)),
    "TorchScript": lambda self, y, _x: self.script(y),
    "writing to the batch": lambda _, y, x: y.add_(
        winograd.WinogradConvolution(nn.Conv3d(8, 16, 3, padding=1))(x.add_(x))
    ),
}


@pytest.mark.parametrize("what", CANNOT.values(), ids=CANNOT)
@torch.inference_mode()
def test_what_cannot_be_captured_stays_as_it_is(what):
    module, x = ready(Other(what)), batch(8, 2, size=(4, 4, 4))
    assert cpu_graph.capture(module, x) is module


def with_first(first, y):
    y[:1].add_(first)
    return y


CAN = {
    "constants": lambda self, y, _x: y.add_(
        self.scale.expand(y[:1].shape).repeat(len(y), 1, 1, 1, 1).to(memory_format=FORMAT)
    ),
    "views": lambda _, y, _x: y.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
    "twice the same": lambda _, y, _x: y + y,
    "its own sum": lambda _, y, _x: y.add_(y),
    "a sum in a part": lambda self, y, _x: with_first(self.up(y[:1]), self.up(y)),
}


@pytest.mark.parametrize("what", CAN.values(), ids=CAN)
@torch.inference_mode()
def test_what_can_be_taped_is(what):
    module, x = ready(Other(what)), batch(8, 2, size=(4, 4, 4))
    network = cpu_graph.capture(module, x)
    assert isinstance(network, CpuGraph)
    for windows in (1, 2):
        assert torch.equal(network(x[:windows]), module(x[:windows]))


@torch.inference_mode()
def test_a_sum_behind_a_transposed_convolution_is_no_step_of_its_own():
    class Skip(nn.Module):
        def __init__(self, together):
            super().__init__()
            self.up, self.together = nn.ConvTranspose3d(8, 16, 2, stride=2), together

        def forward(self, x):
            return self.together(self.up(x), self.up(x))

    module, x = ready(Skip(lambda one, other: one.add_(other))), batch(8, 1, size=(4, 4, 4))
    apart = ready(Skip(lambda one, other: one + other))
    steps = [cpu_graph.capture_graph(each, x).calls for each in (module, apart)]
    assert steps == [3, 3]


@torch.inference_mode()
def test_what_is_never_needed_at_the_same_time_shares_the_arena():
    layers = [nn.Conv3d(16, 16, 3, padding=1) for _ in range(9)]
    x = batch(16, 1, size=(8, 8, 8))
    assert cpu_graph.capture_graph(ready(nn.Sequential(*layers)), x).arena == 2 * x.nbytes
