import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from segmenters import make_runner_with_network, make_settings, start_runner
from torch import Tensor

from service.core.errors import NonFiniteScores, OutOfMemory
from service.core.types import Options, Volume
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.model_runner import ModelRunner
from service.inference.runner.scoring import ScoreComputer
from service.inference.segment import segment
from service.inference.types import Plan
from service.inference.windows.blending import Slab


@pytest.fixture(scope="module")
def eager(bands) -> ModelRunner:
    return start_runner(bands, make_settings())


@pytest.fixture
def volume(phantom) -> Volume:
    return Volume.from_array(phantom.image[None])


def test_windows_are_scored_as_one_stack_without_overlap():
    windows = torch.rand(3, 2, 4, 5, 6)
    calls = []

    def compute_stack(_window, stack, overlap):
        calls.append((tuple(stack.shape), overlap))
        for z in range(0, stack.shape[2], 4):
            yield Slab(z, 0, stack[:, :, z : z + 4])

    ready = SimpleNamespace(window=None)
    computer = ScoreComputer(None, EngineConfig("eager", "fp32", "contiguous", 2), ready)
    assert torch.equal(computer.score_windows(windows, Plan("classes", 2, 0.25), compute_stack), windows)
    assert calls == [((1, 2, 12, 5, 6), 0.0)]


@pytest.mark.parametrize(
    "error", [MemoryError("no"), torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't")]
)
def test_batch_that_does_not_fit_in_memory_is_halved(bands, eager, volume, error):
    forward = eager.score_computer.module.network.forward

    def network(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise error
        return forward(x)

    result = segment(make_runner_with_network(bands, network), volume, Options(sw_batch_size=5))
    assert np.array_equal(result.segmentation.pixels, segment(eager, volume, Options()).segmentation.pixels)
    assert [note.split(" ")[3] for note in result.notes] == ["5", "2"]
    assert result.num_fallbacks == 2


def make_failing_network(error):
    def network(x: Tensor) -> Tensor:
        raise error

    return network


def test_out_of_memory_error_states_the_needed_memory(bands, volume):
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    runner = make_runner_with_network(bands, make_failing_network(RuntimeError(message)))
    with pytest.raises(OutOfMemory, match="GiB is needed") as caught:
        segment(runner, volume, Options())
    assert caught.value.needed_bytes == runner.estimator.estimate(volume, Options()).host_bytes


def test_other_network_errors_are_not_reported_as_out_of_memory(bands, volume):
    with pytest.raises(RuntimeError, match="misallocated"):
        segment(
            make_runner_with_network(bands, make_failing_network(RuntimeError("a misallocated buffer"))),
            volume,
            Options(),
        )


def test_non_finite_scores_of_a_lower_precision_are_recomputed(bands, eager, volume):
    runner = ModelRunner(bands, make_settings(precision="bf16"))
    runner.score_computer.module.network.forward = lambda x: x.repeat(1, 3, 1, 1, 1) * np.inf
    result = segment(runner, volume, Options())
    assert result.is_recomputed
    (note,) = result.notes
    assert "not finite (eager, bf16)" in note
    expected = segment(eager, volume, Options()).segmentation.pixels
    assert np.mean(result.segmentation.pixels != expected) < 1e-5


def test_scores_that_are_not_finite_in_float32_are_rejected(bands, write_model, bands_content, bands_network, volume):
    with pytest.raises(NonFiniteScores):
        segment(make_runner_with_network(bands, lambda x: x.repeat(1, 3, 1, 1, 1) * np.nan), volume, Options())
    broken = copy.deepcopy(bands_network)
    with torch.no_grad():
        next(broken.parameters())[:] = torch.finfo(torch.float32).max
    runner = start_runner(write_model(bands_content, broken), make_settings(precision="bf16"))
    with pytest.raises(NonFiniteScores):
        segment(runner, volume, Options())
