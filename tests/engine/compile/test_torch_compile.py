import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from service.core.errors import BadParameter
from service.core.hardware import devices
from service.engine.compile import torch_compile
from service.models.network import Network

X = torch.rand(2, 2, 8, 8, 8)


class CallCounter(nn.Module):
    """A convolution that counts how many times it runs uncompiled."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv3d(2, 4, 3, padding=1)
        self.eager_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
        return torch.relu(self.convolution(x))


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return CallCounter().eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
@pytest.mark.parametrize("freeze", [True, False])
def test_compiled_network_gives_the_scores_of_the_module(module, freeze):
    counters.clear()
    network = torch_compile.compile_module(module, "default", freeze=freeze)
    scores = [network(X), network(X)]
    assert module.eager_calls == 0
    for actual in scores:
        torch.testing.assert_close(actual, module(X))
    packed_count = counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"]
    if torch.backends.mkldnn.is_available():
        assert packed_count == (1 if freeze else 0)


@torch.inference_mode()
def test_frozen_network_accepts_any_number_of_threads_but_only_one_shape_and_layout(module):
    network = torch_compile.compile_module(module, "default", freeze=True)
    expected, graph_count = network(X), torch_compile.count_graphs()

    def call(thread_count):
        devices.set_torch_threads(thread_count)
        with torch.inference_mode():
            return network(X)

    with ThreadPoolExecutor(3) as pool:
        for scores in pool.map(call, [1, 2, 3] * 10):
            torch.testing.assert_close(scores, expected)
    assert torch_compile.count_graphs() == graph_count, "nothing was recompiled"
    for batch in (X[:1], X.to(memory_format=torch.channels_last_3d)):
        with pytest.raises(BadParameter, match="compiled for"):
            network(batch)


def test_cache_folder_is_created_and_used(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    torch_compile.set_cache_folder(Path("a/cache"))
    assert (tmp_path / "a" / "cache").is_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "a" / "cache")


@pytest.mark.parametrize("freeze", [True, False])
def test_dropping_generated_code_frees_only_the_weights_of_deleted_networks(freeze: bool) -> None:
    def count_weights() -> int:
        gc.collect()
        tensors = (item for item in gc.get_objects() if type(item) in {Tensor, nn.Parameter})
        return sum(tensor.shape[:2] == (37, 41) for tensor in tensors)

    def make() -> Network:
        layer = nn.Conv3d(41, 37, 3).eval().requires_grad_(requires_grad=False)
        return torch_compile.compile_module(layer, "default", freeze=freeze)

    example = torch.rand(1, 41, 4, 4, 4)
    with torch.inference_mode():
        network, deleted_network = make(), make()
        expected = network(example)
        deleted_network(example)
        weight_count, graph_count = count_weights(), torch_compile.count_graphs()
        del deleted_network
        gc.collect()
        torch_compile.drop_generated_code()
        assert 0 < count_weights() < weight_count
        assert torch.equal(network(example), expected)
        assert torch_compile.count_graphs() == graph_count, "the remaining network is not recompiled"
        del network
        torch_compile.drop_generated_code()
        assert count_weights() == 0


def test_graphs_compiled_while_a_model_is_loading_are_not_recompilations() -> None:
    loading_lock = torch_compile.LoadingLock()
    network = torch_compile.compile_module(nn.Conv3d(1, 2, 1).eval(), "default", freeze=False)
    with torch.inference_mode():
        with loading_lock:
            network(torch.rand(1, 1, 4, 4, 4))
        assert loading_lock.recompilation_count == 0
        network(torch.rand(1, 1, 5, 5, 5))
    assert loading_lock.recompilation_count == 1


class ReluVariants(nn.Module):
    """A chain of convolutions, each followed by a different way to call a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        functional = nn.functional
        self.module = nn.ReLU(inplace=True)
        self.activations = [
            *(self.module, functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu),
            *(lambda x: x.relu_(), lambda x: functional.relu(input=x), lambda x: functional.relu(x, inplace=True)),
        ]
        self.convolutions = nn.ModuleList(nn.Conv3d(4, 4, 1) for _ in self.activations)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, activation in zip(self.convolutions, self.activations, strict=True):
            x = activation(convolution(x))
        return x


@torch.inference_mode()
def test_frozen_network_propagates_nan_through_relu():
    torch.manual_seed(0)
    network = ReluVariants().eval().requires_grad_(requires_grad=False)
    frozen_network = torch_compile.compile_module(network, "default", freeze=True)
    x = torch.rand(2, 4, 4, 4, 4)
    torch.testing.assert_close(frozen_network(x), network(x), atol=1e-5, rtol=1e-5)
    x[1, 2, 3, 0, 1] = torch.nan
    assert torch.equal(torch.isnan(frozen_network(x)), torch.isnan(network(x)))
    assert torch.isnan(network(x)).any()
