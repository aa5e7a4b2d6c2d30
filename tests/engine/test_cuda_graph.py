import pytest
import torch
from torch import nn

from service.core.errors import BadParameter
from service.engine.cuda_graph import GraphedNetwork


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
