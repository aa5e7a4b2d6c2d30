import re
from dataclasses import replace

import pytest
import torch
from fake_backends import FakeBackend
from torch import Tensor, nn

from service.core.hardware import devices
from service.core.sections.computing import Engine
from service.engine import backends, base
from service.engine.backends import BACKENDS, build, list_configs
from service.engine.tuning.plans import EngineConfig

EXAMPLE = torch.zeros(2, 1, 8, 8, 8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def make_config(engine, precision="fp32", memory_format="contiguous", mode=None):
    return EngineConfig(engine, precision, memory_format, 2, mode)


class CountingModule(nn.Module):
    """A module that doubles its input and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x


@pytest.fixture
def build_fake(monkeypatch):
    """Return a function that builds a network with a fake engine whose networks are `make(module)`."""

    def build_with(make, config=None, **attributes):
        monkeypatch.setitem(BACKENDS, "other", FakeBackend(make, **attributes))
        return build(CountingModule(), EXAMPLE, config or make_config("other"), Engine())

    return build_with


class UncompilableModule(nn.Module):
    """A module that runs but cannot be compiled."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this module cannot be compiled\nand this line is not shown")
        return 2 * x


def test_eager_engine_runs_the_module_itself():
    module = CountingModule()
    built_network = build(module, EXAMPLE, make_config("eager"), Engine())
    assert module.calls == base.WARM_UP_CALLS
    assert built_network.seconds > 0
    assert torch.equal(built_network.network(EXAMPLE + 1), EXAMPLE + 2)


def test_module_that_cannot_be_compiled_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be compiled") as caught:
        build(UncompilableModule(), EXAMPLE, make_config("compiled", mode="default"), Engine())
    assert "\n" not in backends.get_first_line(caught.value)
    assert backends.get_first_line(RuntimeError()) == "RuntimeError"


def test_number_of_compiled_modules_is_not_limited_by_torchs_recompile_limit():
    for width in range(9):
        module = nn.Sequential(nn.Conv3d(1, 1 + width, 1)).eval().requires_grad_(requires_grad=False)
        built_network = build(module, EXAMPLE, make_config("compiled", mode="default"), Engine(freeze=False))
        assert built_network.network(EXAMPLE).shape[1] == 1 + width


def test_module_is_transformed_before_the_network_is_built(build_fake):
    assert isinstance(build_fake(lambda module: module, transform=lambda module, settings: nn.ReLU()).network, nn.ReLU)


@pytest.mark.parametrize(
    ("network", "is_supported_by_engine", "accepts_partial_batches"),
    [
        (lambda x: 2 * x, True, True),
        (lambda x: 2 * x, False, False),
        (lambda x: 2 * x + len(x), True, False),
    ],
    ids=["smaller batches", "engine does not support it", "different scores"],
)
def test_accepting_smaller_batches_requires_equal_scores_in_smaller_batches(
    build_fake, network, is_supported_by_engine, accepts_partial_batches
):
    assert (
        build_fake(lambda _: network, accepts_smaller_batches=is_supported_by_engine).accepts_partial_batches
        == accepts_partial_batches
    )


@pytest.mark.parametrize(("streams", "accepts_partial_batches"), [(1, True), (2, False)])
def test_accepting_smaller_batches_requires_equal_scores_with_the_threads_of_any_stream(
    build_fake, streams, accepts_partial_batches
):
    def network(x):
        # Mimic libraries that choose an algorithm based on the number of threads.
        return 2 * x + (len(x) if torch.get_num_threads() == 1 else 0)

    thread_count_before = torch.get_num_threads()
    devices.set_torch_threads(2)
    try:
        built_network = build_fake(
            lambda _: network, replace(make_config("other"), streams=streams), accepts_smaller_batches=True
        )
        assert built_network.accepts_partial_batches == accepts_partial_batches
        assert torch.get_num_threads() == 2
    finally:
        devices.set_torch_threads(thread_count_before)


BUFFER = torch.empty(EXAMPLE.shape)


@pytest.mark.parametrize(
    ("network", "owns_scores"),
    [(lambda x: 2 * x, True), (lambda x: x.view(-1), False), (lambda x: BUFFER.copy_(x).view(-1), False)],
    ids=["new memory", "the batch itself", "the same buffer"],
)
def test_network_owns_its_scores_if_each_call_allocates_them(build_fake, network, owns_scores):
    assert build_fake(lambda _: network).owns_scores == owns_scores


def test_winograd_engine_explains_why_it_is_not_used():
    module = nn.Sequential(nn.Conv3d(8, 16, 3, padding=1)).eval()
    assert BACKENDS["winograd"].explain_unsupported("fp16", CPU, module) == "does not support fp16"
    assert BACKENDS["winograd"].explain_unsupported("bf16", CUDA, module) == "needs a CPU"
    assert BACKENDS["winograd"].explain_unsupported("bf16", CPU, nn.Sequential(nn.Conv3d(1, 1, 1))) is not None
    assert BACKENDS["winograd"].explain_unsupported("bf16", CPU, module.bfloat16()) is None


def test_missing_engine_raises_its_installation_hint(build_fake):
    with pytest.raises(ImportError, match="install it"):
        build_fake(lambda module: module, explain_unavailability=lambda: "install it")


@pytest.mark.parametrize(
    ("device", "precisions", "features", "expected"),
    [
        (CPU, ("fp32",), (), ["winograd fp32", "openvino fp32"]),
        (CPU, ("bf16", "fp32"), (), ["winograd bf16", "winograd fp32", "openvino bf16", "openvino fp32"]),
        (
            CPU,
            ("bf16", "fp32"),
            ("amx_bf16",),
            ["openvino bf16", "winograd bf16", "winograd fp32", "openvino fp32"],
        ),
        (CUDA, ("bf16", "fp16", "fp32"), (), ["cudagraph bf16", "cudagraph fp16", "cudagraph fp32"]),
    ],
    ids=["CPU", "CPU with BF16", "CPU with AMX", "GPU"],
)
def test_known_order_depends_on_the_hardware_and_excludes_compilation(device, precisions, features, expected):
    configs = backends.list_quick_configs(list_configs(Engine(), device, precisions, 2), features)
    assert [f"{config.engine} {config.precision}" for config in configs] == expected
    assert {config.compile_mode for config in configs} == {None}


@pytest.mark.parametrize("missing_part", ["compiler", "headers"])
def test_compiling_engines_explain_missing_compiler_or_headers(monkeypatch, tmp_path, missing_part):
    if missing_part == "compiler":
        monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    else:
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    for engine in ("compiled", "winograd"):
        compiled_config = make_config(engine, mode="default")
        assert re.search("/nowhere/g|Python.h", backends.explain_unavailability(compiled_config, CPU) or "")
        assert backends.explain_unavailability(compiled_config, CUDA) is None
        with pytest.raises(ImportError, match="needs"):
            build(CountingModule(), EXAMPLE, compiled_config, Engine())
    assert backends.explain_unavailability(make_config("eager"), CPU) is None


def test_every_engine_in_the_settings_is_registered():
    literal = Engine.model_fields["kind"].annotation
    assert set(literal.__args__) == {"auto", *BACKENDS}


def test_cpu_configurations_start_with_winograd_in_the_narrowest_precision():
    configs = list_configs(Engine(), CPU, ("bf16", "fp32"), 2)
    assert configs[0] == make_config("winograd", "bf16", "channels_last_3d")
    assert set(configs) >= {
        make_config("winograd", memory_format="channels_last_3d"),
        make_config("eager"),
        make_config("eager", memory_format="channels_last_3d"),
        make_config("openvino"),
        make_config("compiled", memory_format="channels_last_3d", mode="default"),
    }
    assert "cudagraph" not in {engine_config.engine for engine_config in configs}
    assert configs[-1].engine == "eager"


def test_gpu_configurations_include_graphs_and_compile_modes_but_no_cpu_engine():
    configs = list_configs(Engine(), CUDA, ("bf16", "fp32"), 8)
    assert {engine_config.engine for engine_config in configs} == {"cudagraph", "compiled", "eager"}
    assert {engine_config.compile_mode for engine_config in configs} == {None, "reduce-overhead", "max-autotune"}
    assert {engine_config.sw_batch_size for engine_config in configs} == {8}
    precisions = [engine_config.precision for engine_config in configs if engine_config.engine == "eager"]
    assert precisions == sorted(precisions)


def test_fixed_settings_are_not_varied():
    settings = Engine(channels_last=False, compile_mode="max-autotune", precision="bf16")
    configs = list_configs(settings, CPU, ("bf16",), 2)
    assert {engine_config.memory_format for engine_config in configs} == {"contiguous"}
    assert {engine_config.precision for engine_config in configs} == {"bf16"}
    assert {engine_config.compile_mode for engine_config in configs} == {None, "max-autotune"}


@pytest.mark.parametrize(
    ("setting", "device", "kind", "expected"),
    [
        ("auto", CPU, "auto", ("default",)),
        ("auto", CUDA, "compiled", ("reduce-overhead",)),
        ("auto", CUDA, "auto", ("reduce-overhead", "max-autotune")),
        ("max-autotune", CPU, "auto", ("max-autotune",)),
    ],
)
def test_compile_modes_depend_on_the_settings_and_the_device(setting, device, kind, expected):
    settings = Engine(compile_mode=setting, kind=kind)
    assert BACKENDS["compiled"].list_compile_modes(settings, device) == expected
    # Other engines compile only if a mode is configured or may be tuned.
    assert BACKENDS["winograd"].list_compile_modes(settings, CPU) == (
        (None, "default") if setting == "auto" else (setting,)
    )
    assert BACKENDS["eager"].list_compile_modes(settings, device) == (None,)


def test_openvino_uses_float32_batches_in_any_precision():
    assert backends.get_batch_dtype(make_config("openvino", "bf16")) == torch.float32
    assert backends.get_batch_dtype(make_config("eager", "bf16")) == torch.bfloat16
