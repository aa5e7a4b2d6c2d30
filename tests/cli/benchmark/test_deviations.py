from dataclasses import replace

import pytest

from service.cli.benchmark.deviations import find_deviations
from service.core.sections.computing import Engine
from service.inference.types import EngineReport

CPU = EngineReport(
    "cpu", "a processor", "eager", "fp32", "contiguous", None, (64, 64, 64), 2, 0.25, "gaussian", 1.0, ()
)
GPU = replace(
    CPU,
    device="cuda:0",
    engine="cudagraph",
    precision="bf16",
    memory_format="channels_last_3d",
    compile_mode="reduce-overhead",
)
PRESET = Engine(kind="cudagraph", precision="bf16", channels_last=True, compile_mode="reduce-overhead")


@pytest.mark.parametrize(
    ("settings", "report"),
    [
        (Engine(), CPU),
        (PRESET, GPU),
        (Engine(kind="cudagraph"), replace(GPU, compile_mode=None)),
        (Engine(kind="eager", precision="fp32", channels_last=False), CPU),
        # The eager engine is never compiled, on a GPU either.
        (Engine(kind="eager", compile_mode="default"), replace(CPU, device="cuda:0")),
        (Engine(kind="compiled", compile_mode="default"), replace(CPU, engine="compiled", compile_mode="default")),
        # OpenVINO selects the memory format itself.
        (Engine(kind="openvino", channels_last=True), replace(CPU, engine="openvino")),
        # CPU engines that do not use compilation.
        (Engine(kind="auto", compile_mode="reduce-overhead"), CPU),
        (Engine(kind="eager", compile_mode="reduce-overhead"), CPU),
        (Engine(kind="winograd", compile_mode="reduce-overhead"), replace(CPU, engine="winograd")),
        (Engine(kind="openvino", compile_mode="reduce-overhead"), replace(CPU, engine="openvino")),
        # Warnings on a CPU, or with an automatically selected engine.
        (Engine(kind="eager"), replace(CPU, warnings=("This device has no bf16 units.",))),
        (Engine(), replace(GPU, warnings=("This device has no bf16 units.",))),
    ],
)
def test_network_that_runs_as_configured_has_no_deviations(settings, report):
    assert find_deviations(settings, report) == []


@pytest.mark.parametrize(
    ("settings", "report", "expected"),
    [
        (
            PRESET,
            replace(GPU, compile_mode=None),
            "engine.compile_mode is reduce-overhead, but the network ran with none",
        ),
        (PRESET, replace(GPU, precision="fp32"), "engine.precision is bf16, but the network ran with fp32"),
        (
            PRESET,
            replace(GPU, memory_format="contiguous"),
            "engine.channels_last is true, but the network ran with contiguous",
        ),
        (
            Engine(channels_last=False),
            replace(CPU, memory_format="channels_last_3d"),
            "engine.channels_last is false, but the network ran with channels_last_3d",
        ),
        (
            Engine(compile_mode="reduce-overhead"),
            replace(GPU, compile_mode=None),
            "engine.compile_mode is reduce-overhead, but the network ran with none",
        ),
        (
            Engine(kind="compiled", compile_mode="default"),
            replace(GPU, engine="compiled"),
            "engine.compile_mode is default, but the network ran with reduce-overhead",
        ),
        (Engine(kind="openvino"), CPU, "engine.kind is openvino, but the network ran with eager"),
        (
            Engine(kind="cudagraph"),
            replace(GPU, warnings=("It is not finished.",)),
            "engine.kind is cudagraph, but the engine reported a warning: It is not finished.",
        ),
    ],
)
def test_deviation_contains_the_setting_and_the_actual_value(settings, report, expected):
    assert find_deviations(settings, report) == [expected]


def test_fallback_to_eager_deviates_in_several_settings():
    eager = replace(CPU, device="cuda:0", warnings=("The cudagraph engine failed: no compiler",))
    assert [line.split(",")[0] for line in find_deviations(PRESET, eager)] == [
        "engine.kind is cudagraph",
        "engine.precision is bf16",
        "engine.channels_last is true",
        "engine.compile_mode is reduce-overhead",
        "engine.kind is cudagraph",
    ]
