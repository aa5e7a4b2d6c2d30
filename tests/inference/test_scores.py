from types import SimpleNamespace

import torch

from service.engine.plans import EngineConfig
from service.inference.estimate import Plan
from service.inference.scores import ScoreComputer
from service.inference.windows.blending import Slab


def test_a_pile_of_windows_passes_as_a_stack():
    windows = torch.rand(3, 2, 4, 5, 6)
    collected = []

    def as_stack(_window, stack, overlap):
        collected.append((tuple(stack.shape), overlap))
        for z in range(0, stack.shape[2], 4):
            yield Slab(z, 0, stack[:, :, z : z + 4])

    ready = SimpleNamespace(window=None)
    computer = ScoreComputer(None, EngineConfig("eager", "fp32", "contiguous", 2), ready)
    assert torch.equal(computer.score_windows(windows, Plan("classes", 2, 0.25), as_stack), windows)
    assert collected == [((1, 2, 12, 5, 6), 0.0)]
