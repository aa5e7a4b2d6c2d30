import pytest
import torch
from paths import ROOT
from torch import nn

from service.core.config import Engine, read_settings
from service.core.errors import BadParameter
from service.engine.backends import list_configs
from service.engine.cuda_graph import CudaGraphBackend, GraphedNetwork
from service.engine.plans import EngineConfig


class FakeRecorder:
    """Replays by running the recorded work again and copying into the tensor that the capture returned."""

    def __init__(self):
        self.log = []

    def warm_up(self, work):
        self.log.append("warm up")
        work()

    def capture(self, work):
        self.log.append("capture")
        self._work, self._output = work, work()
        return self._output

    def replay(self):
        self.log.append("replay")
        self._output.copy_(self._work())


@torch.inference_mode()
def test_a_graph_is_recorded_once_after_warming_up_and_then_replayed():
    recorder = FakeRecorder()
    network = GraphedNetwork(lambda x: 2 * x, torch.zeros(2, 1, 3, 3, 3), recorder)
    assert recorder.log == ["warm up", "capture"]
    for value in (1.0, 5.0):
        assert torch.equal(network(torch.full((2, 1, 3, 3, 3), value)), torch.full((2, 1, 3, 3, 3), 2 * value))
    assert recorder.log == ["warm up", "capture", "replay", "replay"]


@torch.inference_mode()
def test_the_example_and_the_input_are_left_alone():
    example, x = torch.zeros(1, 1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2)
    network = GraphedNetwork(lambda x: x + 1, example, FakeRecorder())
    network(x)
    assert not example.any()
    assert torch.equal(x, torch.ones(1, 1, 2, 2, 2))


@torch.inference_mode()
def test_scores_of_every_call_lie_in_the_same_place():
    network = GraphedNetwork(lambda x: x + 1, torch.zeros(1, 1, 2, 2, 2), FakeRecorder())
    first, second = network(torch.zeros(1, 1, 2, 2, 2)), network(torch.ones(1, 1, 2, 2, 2))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 1, 3, 3, 3), torch.zeros(2, 1, 3, 3, 4), torch.zeros(2, 1, 3, 3, 3).double()]
)
def test_other_shapes_and_dtypes_are_refused(other):
    network = GraphedNetwork(lambda x: x, torch.zeros(2, 1, 3, 3, 3), FakeRecorder())
    with pytest.raises(BadParameter, match=r"recorded for \(2, 1, 3, 3, 3\)"):
        network(other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
def test_a_real_graph_gives_the_scores_of_the_module():
    module = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1)).cuda().eval()
    network = GraphedNetwork(module, torch.zeros(2, 1, 16, 16, 16, device="cuda"))
    for _ in range(3):
        x = torch.rand(2, 1, 16, 16, 16, device="cuda")
        torch.testing.assert_close(network(x), module(x))


def test_what_is_recorded_is_compiled_first_without_graphs_of_torch():
    calls = []

    def compile_network(module, mode, *, freeze):
        calls.append((module, mode, freeze))
        return lambda x: module(x) + 1

    backend = CudaGraphBackend(lambda network, x: network(x), compile_network)
    module, example = nn.Identity(), torch.zeros(1)
    for mode, expected in [(None, 0), ("reduce-overhead", 1), ("default", 1)]:
        config = EngineConfig("cudagraph", "bf16", "channels_last_3d", 8, mode)
        assert backend.build(module, example, config, Engine()).item() == expected
    assert calls == [(module, "default", False)] * 2


def test_the_preset_for_a_gpu_states_what_runs_before_anything_is_tuned():
    settings = read_settings(ROOT / "configs" / "gpu.yaml", {}).engine
    first, *_ = list_configs(settings, torch.device("cuda"), ("bf16",), 8)
    assert first == EngineConfig("cudagraph", "bf16", "channels_last_3d", 8, "reduce-overhead")


def test_a_compile_mode_that_is_set_comes_first_and_none_where_it_does_not_run():
    device = torch.device("cuda")
    assert CudaGraphBackend().compile_modes(Engine(compile_mode="default"), device) == ("default", None)
    assert CudaGraphBackend().compile_modes(Engine(), device)[0] is None, "ready in seconds"
