"""Tests that captured networks give the same results as networks that run layer by layer."""

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
from service.models.architectures.shuffle_unet import ShuffleUNet

FORMAT = torch.channels_last_3d
DTYPES = [torch.bfloat16, torch.float32]


class Residual(nn.Module):
    """A network like MONAI's: norms, residual connections, and strided and transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(8, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.PReLU())
        self.shortcut = nn.Conv3d(8, 16, 1)
        self.down = nn.Sequential(nn.Conv3d(16, 32, 2, stride=2), nn.GroupNorm(4, 32), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose3d(32, 16, 2, stride=2)
        self.last = nn.Conv3d(16, 8, 1)

    def forward(self, x):
        top = self.first(x) + self.shortcut(x)
        scores = self.up(self.down(top))
        scores += top
        return self.last(scores)


def prepare_and_pack(network, dtype=torch.float32):
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    prepared = prepare(network, torch.device("cpu"), dtype, FORMAT)
    return onednn.pack_convolutions(winograd.replace_convolutions(prepared).network)


def make_batch(channels, window_count=3, dtype=torch.float32, size=(8, 16, 24)):
    return torch.randn(window_count, channels, *size).to(dtype).to(memory_format=FORMAT)


@pytest.fixture
def captured_network():
    """A module, a batch, and the module captured for batches like it."""
    module, x = prepare_and_pack(ShuffleUNet(1, 2, (16, 32))), make_batch(1)
    return module, x, CpuGraph(module, x)


NETWORKS = [(lambda: ShuffleUNet(1, 2, (16, 32)), 1), (lambda: ShuffleUNet(2, 3, (16, 16, 32)), 2), (Residual, 8)]


@pytest.mark.parametrize(("make", "channels"), NETWORKS, ids=["one channel", "two channels", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_scores_are_bit_identical_to_those_of_the_module(make, channels, dtype):
    module, x = prepare_and_pack(make(), dtype), make_batch(channels, dtype=dtype)
    if channels == 2:
        # Use a contiguous batch, which ATen would convert before the space-to-depth layer.
        x = x.contiguous()
    captured_network = CpuGraph(module, x)
    thread_count_before = torch.get_num_threads()
    try:
        for thread_count, window_count in itertools.product((1, 2), (1, 2, 3)):
            torch.set_num_threads(thread_count)
            part = torch.randn_like(x)[:window_count]
            scores, expected = captured_network(part), module(part)
            assert torch.equal(scores, expected)
            assert scores.stride() == expected.stride()
    finally:
        torch.set_num_threads(thread_count_before)


@torch.inference_mode()
def test_replay_does_not_call_python_code(captured_network):
    module, x, graph = captured_network
    expected = module(x)
    module.forward = None
    assert torch.equal(graph(x), expected)


@torch.inference_mode()
def test_graph_keeps_the_weights_alive():
    module, x = prepare_and_pack(Residual(), torch.bfloat16), make_batch(8, dtype=torch.bfloat16)
    graph, expected = cpu_graph.capture_graph(module, x), module(x)
    del module
    gc.collect()
    # Allocate tensors that would overwrite freed weights.
    fillers = [torch.full((1024 * size,), torch.nan) for size in range(1, 100)]
    arena = cpu_graph.Arena(graph.arena_bytes)
    arena.memory.fill_(255)
    assert torch.equal(graph.replay(x, arena, BufferPool(graph.score_bytes, 0)), expected)
    assert fillers


@torch.inference_mode()
def test_calls_do_not_affect_earlier_or_later_scores(captured_network):
    module, x, graph = captured_network
    first, expected = graph(x), module(x)
    with_nan = x.clone()
    with_nan[0, 0, 3, 4, 5] = torch.nan
    assert graph(with_nan)[0].isnan().any()
    assert torch.equal(graph(with_nan)[1:], expected[1:])
    assert torch.equal(graph(x), expected)
    assert torch.equal(first, expected)


@torch.inference_mode()
def test_memory_of_scores_is_reused_once_they_are_unreferenced(captured_network):
    """Views count as references, and batches of other sizes use the same memory."""
    _module, x, graph = captured_network
    scores = graph(x)
    address, view = scores.data_ptr(), scores[1:]
    expected = view.clone()
    del scores
    assert graph(x[:1]).data_ptr() != address
    assert torch.equal(view, expected)
    del view
    assert graph(x[:1]).data_ptr() == address


@torch.inference_mode()
def test_threads_can_replay_concurrently(captured_network):
    module, x, graph = captured_network
    inputs = [torch.randn_like(x) for _ in range(4)]
    expected = [module(batch) for batch in inputs]

    @torch.inference_mode()
    def run(index):
        return all(torch.equal(graph(inputs[index]), expected[index]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@torch.inference_mode()
def test_other_shapes_and_layouts_are_passed_to_the_module():
    module, strided_batch = prepare_and_pack(ShuffleUNet(1, 2, (16, 32))), torch.randn(3, 1, 8, 16, 48)[..., ::2]
    # An example with gaps between its elements does not allow other batches with gaps.
    for captured_network in (CpuGraph(module, make_batch(1)), CpuGraph(module, strided_batch[:2])):
        for other_batch in (
            make_batch(1, 4),
            make_batch(1, size=(16, 16, 16)),
            strided_batch,
            strided_batch[:2],
            strided_batch[..., :16],
        ):
            assert torch.equal(captured_network(other_batch), module(other_batch))


class WithOperation(nn.Module):
    """A convolution followed by an arbitrary operation."""

    def __init__(self, operation):
        super().__init__()
        self.layer, self.operation = nn.Conv3d(8, 16, 3, padding=1), operation
        self.scale = nn.Parameter(torch.randn(1))
        self.script, self.up = torch.jit.script(nn.Sigmoid()), nn.ConvTranspose3d(16, 16, 2, stride=2)

    def forward(self, x):
        return self.operation(self, self.layer(x), x)


def copy_without_aten(x):
    """Copy a tensor without an ATen operator."""
    floats = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    return torch.frombuffer(bytearray(floats), dtype=x.dtype).as_strided(x.shape, x.stride())


UNCAPTURABLE_OPERATIONS = {
    "an operator": lambda _, y, _x: y.sigmoid(),
    "an operator in place": lambda _, y, _x: y.mul_(2),
    "a sum with a number": lambda _, y, _x: y + 1,
    "a scaled sum": lambda _, y, _x: torch.add(y, y, alpha=2),
    "a sum that broadcasts": lambda _, y, _x: y + y[:1],
    "random numbers": lambda _, y, _x: y + torch.rand_like(y),
    "control flow by values": lambda _, y, x: y if y.sum().item() > 0 else x,
    "a view as the result": lambda _, y, _x: y[:, :8],
    "the input as the result": lambda _, _y, x: x,
    "an unwritten result": lambda _, _y, x: torch.empty_like(x),
    "a sum with an unwritten tensor": lambda _, y, _x: torch.empty_like(y).add_(y),
    "a constant result": lambda _, y, _x: torch.zeros_like(y),
    "several results": lambda _, y, _x: (y, y),
    "an unpacked convolution": lambda _, y, _x: nn.functional.conv3d(y, torch.ones(1, 16, 3, 3, 3)),
    "values read through NumPy": lambda _, y, x: y if x.numpy().mean() < 1 else x,
    "values read as a list": lambda _, y, x: y if x.tolist() else x,
    "a copy without ATen": lambda _, y, x: y.add_(copy_without_aten(x).repeat(1, 2, 1, 1, 1).to(memory_format=FORMAT)),
    "TorchScript": lambda self, y, _x: self.script(y),
    "writing to the batch": lambda _, y, x: y.add_(
        winograd.WinogradConvolution(nn.Conv3d(8, 16, 3, padding=1))(x.add_(x))
    ),
}


@pytest.mark.parametrize("operation", UNCAPTURABLE_OPERATIONS.values(), ids=UNCAPTURABLE_OPERATIONS)
@torch.inference_mode()
def test_capture_returns_the_module_if_it_cannot_be_captured(operation):
    module, x = prepare_and_pack(WithOperation(operation)), make_batch(8, 2, size=(4, 4, 4))
    assert cpu_graph.capture(module, x) is module


def add_to_first_window(first, y):
    y[:1].add_(first)
    return y


CAPTURABLE_OPERATIONS = {
    "constants": lambda self, y, _x: y.add_(
        self.scale.expand(y[:1].shape).repeat(len(y), 1, 1, 1, 1).to(memory_format=FORMAT)
    ),
    "views": lambda _, y, _x: y.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
    "a sum of a tensor with itself": lambda _, y, _x: y + y,
    "the same in place": lambda _, y, _x: y.add_(y),
    "a sum in a view": lambda self, y, _x: add_to_first_window(self.up(y[:1]), self.up(y)),
}


@pytest.mark.parametrize("operation", CAPTURABLE_OPERATIONS.values(), ids=CAPTURABLE_OPERATIONS)
@torch.inference_mode()
def test_views_constants_and_sums_can_be_captured(operation):
    module, x = prepare_and_pack(WithOperation(operation)), make_batch(8, 2, size=(4, 4, 4))
    network = cpu_graph.capture(module, x)
    assert isinstance(network, CpuGraph)
    for window_count in (1, 2):
        assert torch.equal(network(x[:window_count]), module(x[:window_count]))


@torch.inference_mode()
def test_sum_in_place_is_fused_with_the_transposed_convolution_before_it():
    class Skip(nn.Module):
        def __init__(self, add):
            super().__init__()
            self.up, self.add = nn.ConvTranspose3d(8, 16, 2, stride=2), add

        def forward(self, x):
            return self.add(self.up(x), self.up(x))

    in_place_module, x = (
        prepare_and_pack(Skip(lambda first, second: first.add_(second))),
        make_batch(8, 1, size=(4, 4, 4)),
    )
    separate_module = prepare_and_pack(Skip(lambda first, second: first + second))
    call_counts = [cpu_graph.capture_graph(module, x).call_count for module in (in_place_module, separate_module)]
    assert call_counts == [3, 3]


@torch.inference_mode()
def test_tensors_with_disjoint_lifetimes_share_the_arena():
    layers = [nn.Conv3d(16, 16, 3, padding=1) for _ in range(9)]
    x = make_batch(16, 1, size=(8, 8, 8))
    assert cpu_graph.capture_graph(prepare_and_pack(nn.Sequential(*layers)), x).arena_bytes == 2 * x.nbytes
