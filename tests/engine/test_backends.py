import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from service.core import config, hardware
from service.engine import backends
from service.engine.backends import KINDS, build, choices
from service.engine.plans import EngineConfig
from service.engine.precision import DTYPES
from service.engine.prepare import prepare
from service.models.architectures import ShuffleUNet

EXAMPLE = torch.zeros(2, 1, 8, 8, 8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choice_of(engine, precision="fp32", memory_format="contiguous", mode=None):
    return EngineConfig(engine, precision, memory_format, 2, mode)


class Counting(nn.Module):
    """Doubles its input; counts how often Python runs it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x


class Uncompilable(nn.Module):
    """Runs, but not while it is being compiled."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this module cannot be compiled\nand this line is not shown")
        return 2 * x


def test_eager_runs_the_module_itself():
    module = Counting()
    built = build(module, EXAMPLE, choice_of("eager"), config.Engine())
    assert module.calls == backends.WARM_UP_CALLS
    assert built.seconds > 0
    assert torch.equal(built.network(EXAMPLE + 1), EXAMPLE + 2)


def test_a_module_that_cannot_be_compiled_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be compiled") as caught:
        build(Uncompilable(), EXAMPLE, choice_of("compiled", mode="default"), config.Engine())
    assert "\n" not in backends.first_line(caught.value)


def test_more_modules_of_one_kind_are_compiled_than_torch_has_variants_of_a_function():
    for width in range(9):
        module = nn.Sequential(nn.Conv3d(1, 1 + width, 1)).eval().requires_grad_(requires_grad=False)
        built = build(module, EXAMPLE, choice_of("compiled", mode="default"), config.Engine(freeze=False))
        assert built.network(EXAMPLE).shape[1] == 1 + width


def test_an_error_without_words_is_called_by_its_name():
    assert backends.first_line(RuntimeError()) == "RuntimeError"


def test_a_module_is_transformed_before_the_engine_is_made(monkeypatch):
    kind = backends.Backend(lambda module, *_: module, {"cpu": ("contiguous",)}, transform=lambda module: nn.ReLU())
    monkeypatch.setitem(KINDS, "other", kind)
    assert isinstance(build(Counting(), EXAMPLE, choice_of("other"), config.Engine()).network, nn.ReLU)


@pytest.mark.parametrize(
    ("network", "any_batch", "any_batch_size"),
    [
        (lambda x: 2 * x, True, True),
        (lambda x: 2 * x, False, False),
        (lambda x: 2 * x + len(x), True, False),
    ],
    ids=["any batch", "not said to be", "other scores"],
)
def test_what_takes_fewer_windows_must_give_the_same_scores_for_them(monkeypatch, network, any_batch, any_batch_size):
    kind = backends.Backend(lambda *_: network, {"cpu": ("contiguous",)}, any_batch=any_batch)
    monkeypatch.setitem(KINDS, "other", kind)
    assert build(Counting(), EXAMPLE, choice_of("other"), config.Engine()).any_batch_size == any_batch_size


@pytest.mark.parametrize(("streams", "any_batch_size"), [(1, True), (2, False)])
def test_fewer_windows_must_give_the_same_scores_in_any_stream(monkeypatch, streams, any_batch_size):
    def network(x):
        # As libraries do that choose an algorithm by the threads there are.
        return 2 * x + (len(x) if torch.get_num_threads() == 1 else 0)

    monkeypatch.setitem(KINDS, "other", backends.Backend(lambda *_: network, {"cpu": ("contiguous",)}, any_batch=True))
    before = torch.get_num_threads()
    hardware.use_threads(2)
    try:
        choice = replace(choice_of("other"), streams=streams)
        assert build(Counting(), EXAMPLE, choice, config.Engine()).any_batch_size == any_batch_size
        assert torch.get_num_threads() == 2
    finally:
        hardware.use_threads(before)


BUFFER = torch.empty(EXAMPLE.shape)


@pytest.mark.parametrize(
    ("network", "owns_scores"),
    [(lambda x: 2 * x, True), (lambda x: x.view(-1), False), (lambda x: BUFFER.copy_(x).view(-1), False)],
    ids=["new", "the batch itself", "the same buffer"],
)
def test_scores_last_where_each_call_gives_new_ones(monkeypatch, network, owns_scores):
    monkeypatch.setitem(KINDS, "other", backends.Backend(lambda *_: network, {"cpu": ("contiguous",)}))
    assert build(Counting(), EXAMPLE, choice_of("other"), config.Engine()).owns_scores == owns_scores


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_winograd_convolutions_take_any_number_of_windows_unless_they_are_compiled(precision):
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1), nn.PReLU()),
        *(nn.Conv3d(16, 32, 2, stride=2), nn.ReLU(), nn.Conv3d(32, 2, 1)),
    )
    module = module.eval().requires_grad_(requires_grad=False).to(DTYPES[precision])
    example = torch.rand(2, 8, 8, 8, 8).to(DTYPES[precision], memory_format=torch.channels_last_3d)
    choice = choice_of("winograd", precision, memory_format="channels_last_3d")
    built = build(module, example, choice, config.Engine())
    assert built.any_batch_size
    with torch.inference_mode():
        expected = copy.deepcopy(module).float()(example.float())
        difference = (built.network(example).float() - expected).abs().max()
    assert difference <= {"bf16": 0.02, "fp32": 1e-5}[precision] * expected.abs().max()


def test_scores_of_winograd_convolutions_stay_as_narrow_as_they_were_computed():
    module = nn.Sequential(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 2, 1))
    example = torch.rand(2, 8, 8, 8, 8).to(torch.bfloat16, memory_format=torch.channels_last_3d)
    wide = prepare(module, CPU, torch.bfloat16, torch.channels_last_3d)
    built = build(wide, example, choice_of("winograd", "bf16", memory_format="channels_last_3d"), config.Engine())
    with torch.inference_mode():
        scores, expected = built.network(example), wide(example)
    assert (scores.dtype, expected.dtype) == (torch.bfloat16, torch.float32)
    assert (scores - expected).abs().max() <= 0.02 * expected.abs().max()


def test_winograd_is_what_is_tried_first_in_the_narrowest_precision_that_it_computes():
    found = choices(config.Engine(), CPU, ("bf16", "fp32"), 2)
    assert found[0] == choice_of("winograd", "bf16", "channels_last_3d")
    assert {choice.precision for choice in found if choice.engine == "winograd"} == {"bf16", "fp32"}
    module = nn.Sequential(nn.Conv3d(8, 16, 3, padding=1)).eval()
    assert backends.unfit(KINDS["winograd"], "fp16", CPU, module) == "does not compute in fp16"
    assert backends.unfit(KINDS["winograd"], "bf16", CUDA, module) == "needs a CPU"
    assert backends.unfit(KINDS["winograd"], "bf16", CPU, nn.Sequential(nn.Conv3d(1, 1, 1))) is not None
    assert backends.unfit(KINDS["winograd"], "bf16", CPU, module.bfloat16()) is None


def test_an_engine_that_is_missing_says_how_to_get_it(monkeypatch):
    kind = backends.Backend(lambda module, *_: module, {"cpu": ("contiguous",)}, missing=lambda: "install it")
    monkeypatch.setitem(KINDS, "other", kind)
    with pytest.raises(ImportError, match="install it"):
        build(Counting(), EXAMPLE, choice_of("other"), config.Engine())


def test_every_engine_that_can_be_configured_is_known():
    literal = config.Engine.model_fields["kind"].annotation
    assert set(literal.__args__) == {"auto", *KINDS}


def test_a_cpu_tries_its_own_engines_in_every_open_format():
    found = choices(config.Engine(), CPU, ("fp32",), 2)
    assert set(found) >= {
        choice_of("eager"),
        choice_of("eager", memory_format="channels_last_3d"),
        choice_of("openvino"),
        choice_of("compiled", memory_format="channels_last_3d", mode="default"),
    }
    assert "cudagraph" not in {choice.engine for choice in found}
    assert found[-1].engine == "eager"


def test_a_gpu_tries_graphs_and_modes_but_no_engine_of_a_cpu():
    found = choices(config.Engine(), CUDA, ("bf16", "fp32"), 8)
    assert {choice.engine for choice in found} == {"cudagraph", "compiled", "tensorrt", "eager"}
    assert {choice.compile_mode for choice in found} == {None, "reduce-overhead", "max-autotune"}
    assert {choice.sw_batch_size for choice in found} == {8}
    precisions = [choice.precision for choice in found if choice.engine == "eager"]
    assert precisions == sorted(precisions)


def test_what_is_fixed_is_not_varied():
    settings = config.Engine(channels_last=False, compile_mode="max-autotune", precision="bf16")
    found = choices(settings, CPU, ("bf16",), 2)
    assert {choice.memory_format for choice in found} == {"contiguous"}
    assert {choice.precision for choice in found} == {"bf16"}
    assert {choice.compile_mode for choice in found} == {None, "max-autotune"}


@pytest.mark.parametrize(
    ("setting", "device", "kind", "expected"),
    [
        ("auto", CPU, "auto", ("default",)),
        ("auto", CUDA, "compiled", ("reduce-overhead",)),
        ("auto", CUDA, "auto", ("reduce-overhead", "max-autotune")),
        ("max-autotune", CPU, "auto", ("max-autotune",)),
    ],
)
def test_compile_modes(setting, device, kind, expected):
    settings = config.Engine(compile_mode=setting, kind=kind)
    assert backends.compile_modes(settings, KINDS["compiled"], device) == expected
    assert backends.compile_modes(settings, KINDS["eager"], device) == (None,)


def test_winograd_is_compiled_only_where_that_is_asked_for_or_tried_out():
    def modes(**settings):
        return backends.compile_modes(config.Engine(**settings), KINDS["winograd"], CPU)

    assert modes() == modes(kind="winograd") == (None, "default")
    assert modes(kind="winograd", compile_mode="default") == ("default",)


def test_an_engine_of_its_own_precision_keeps_float32_outside():
    assert backends.batch_dtype(choice_of("openvino", "bf16")) == torch.float32
    assert backends.batch_dtype(choice_of("eager", "bf16")) == torch.bfloat16


def test_what_every_stream_keeps_is_counted():
    network = ShuffleUNet(1, 2, (16, 32))
    module = prepare(network, CPU, torch.float32, torch.channels_last_3d)
    weights = backends.weight_bytes(KINDS["winograd"].transform(module))
    one, four = (
        build(module, EXAMPLE, replace(choice_of("winograd"), streams=streams), config.Engine()) for streams in (1, 4)
    )
    # At the least what goes into a convolution at full size, and what comes of it.
    kept = one.nbytes - weights
    assert kept >= 2 * 16 * EXAMPLE[:, :, ::2, ::2, ::2].nbytes
    assert four.nbytes - weights == 4 * kept
    with torch.inference_mode():
        assert one.score_bytes == four.score_bytes == one.network(EXAMPLE)[0].nbytes
    assert build(module, EXAMPLE, choice_of("eager"), config.Engine()).score_bytes is None
