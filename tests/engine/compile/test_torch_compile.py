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


class Spy(nn.Module):
    """A convolution whose Python code says when it runs uncompiled."""

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
    return Spy().eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
@pytest.mark.parametrize("freeze", [True, False])
def test_compiled_scores_are_those_of_the_module(module, freeze):
    counters.clear()
    network = torch_compile.compile_module(module, "default", freeze=freeze)
    scores = [network(X), network(X)]
    assert module.eager_calls == 0
    for got in scores:
        torch.testing.assert_close(got, module(X))
    packed = counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"]
    if torch.backends.mkldnn.is_available():
        assert packed == (1 if freeze else 0)


@torch.inference_mode()
def test_a_frozen_network_runs_in_any_threads_but_with_no_other_shape_or_layout(module):
    network = torch_compile.compile_module(module, "default", freeze=True)
    expected, graphs = network(X), torch_compile.count_graphs()

    def call(threads):
        devices.use_threads(threads)
        with torch.inference_mode():
            return network(X)

    with ThreadPoolExecutor(3) as pool:
        for scores in pool.map(call, [1, 2, 3] * 10):
            torch.testing.assert_close(scores, expected)
    assert torch_compile.count_graphs() == graphs, "nothing was compiled again"
    for other in (X[:1], X.to(memory_format=torch.channels_last_3d)):
        with pytest.raises(BadParameter, match="compiled for"):
            network(other)


def test_the_cache_folder_is_made_and_used(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    torch_compile.set_cache_folder(Path("a/cache"))
    assert (tmp_path / "a" / "cache").is_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "a" / "cache")


@pytest.mark.parametrize("freeze", [True, False])
def test_weights_go_with_the_network_and_those_of_others_stay(freeze: bool) -> None:
    def weights() -> int:
        gc.collect()
        tensors = (one for one in gc.get_objects() if type(one) in {Tensor, nn.Parameter})
        return sum(one.shape[:2] == (37, 41) for one in tensors)

    def make() -> Network:
        layer = nn.Conv3d(41, 37, 3).eval().requires_grad_(requires_grad=False)
        return torch_compile.compile_module(layer, "default", freeze=freeze)

    example = torch.rand(1, 41, 4, 4, 4)
    with torch.inference_mode():
        kept, gone = make(), make()
        expected = kept(example)
        gone(example)
        both, graphs = weights(), torch_compile.count_graphs()
        del gone
        gc.collect()
        torch_compile.drop_generated_code()
        assert 0 < weights() < both
        assert torch.equal(kept(example), expected)
        assert torch_compile.count_graphs() == graphs, "what is in use is not compiled again"
        del kept
        torch_compile.drop_generated_code()
        assert weights() == 0


def test_graphs_count_as_recompilations_only_while_nothing_is_loaded() -> None:
    loading = torch_compile.LoadingLock()
    network = torch_compile.compile_module(nn.Conv3d(1, 2, 1).eval(), "default", freeze=False)
    with torch.inference_mode():
        with loading:
            network(torch.rand(1, 1, 4, 4, 4))
        assert loading.recompilations == 0
        network(torch.rand(1, 1, 5, 5, 5))
    assert loading.recompilations == 1


class Rectified(nn.Module):
    """A convolution before every spelling of a rectifier."""

    def __init__(self) -> None:
        super().__init__()
        functional = nn.functional
        self.module = nn.ReLU(inplace=True)
        self.spellings = [
            *(self.module, functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu),
            *(lambda x: x.relu_(), lambda x: functional.relu(input=x), lambda x: functional.relu(x, inplace=True)),
        ]
        self.convolutions = nn.ModuleList(nn.Conv3d(4, 4, 1) for _ in self.spellings)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, rectify in zip(self.convolutions, self.spellings, strict=True):
            x = rectify(convolution(x))
        return x


@torch.inference_mode()
def test_what_is_not_finite_within_a_frozen_network_reaches_its_scores():
    torch.manual_seed(0)
    network = Rectified().eval().requires_grad_(requires_grad=False)
    frozen = torch_compile.compile_module(network, "default", freeze=True)
    x = torch.rand(2, 4, 4, 4, 4)
    torch.testing.assert_close(frozen(x), network(x), atol=1e-5, rtol=1e-5)
    x[1, 2, 3, 0, 1] = torch.nan
    assert torch.equal(torch.isnan(frozen(x)), torch.isnan(network(x)))
    assert torch.isnan(network(x)).any()
