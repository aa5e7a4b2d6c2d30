import threading
import time
from dataclasses import replace
from types import NoneType

import pytest
import torch
from fake_backends import FakeBackend, copy_with
from fakes import SeparateMemoryDriver
from torch import nn

from service.core.config import Settings
from service.core.hardware import devices, host
from service.core.telemetry import Progress
from service.core.types import Segmentation
from service.engine import backends
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.engine_builder import choose_default_batch_size
from service.inference.runner.selector import EngineSelector
from service.models.loader import load_network

CPU = torch.device("cpu")


class WrongNetwork(nn.Module):
    """Very fast network with wrong scores."""

    def forward(self, x):
        return x.float().repeat(1, 3, 1, 1, 1)


def fail_to_build(_module):
    raise RuntimeError("not here")


@pytest.fixture
def settings(tmp_path):
    """Function that returns settings with the given `engine` options and a temporary cache folder."""

    def make(windows=None, limits=None, **engine):
        sections = {"engine": {"cache_folder": tmp_path / "cache"} | engine}
        return Settings.model_validate(sections | {"windows": windows or {}, "limits": limits or {}})

    return make


@pytest.fixture
def limit_engines(monkeypatch):
    """Function that limits the available engines to the named ones and to those passed as keywords."""

    def limit(*names, **kinds):
        monkeypatch.setattr(backends, "BACKENDS", {name: backends.BACKENDS[name] for name in names} | kinds)

    return limit


@pytest.fixture
def use_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_selector(spec, chosen_settings, network=None, window_bytes=1000):
    # Use only float32, because trials and labels would differ on machines that support bfloat16.
    native_dtypes = frozenset({torch.float32})
    return EngineSelector(
        spec, chosen_settings, CPU, load_network(spec) if network is None else network, window_bytes, native_dtypes
    )


def fixed(settings, **engine):
    """Return settings that fix the test engine, whose name would not pass validation."""
    chosen_settings = settings(**engine)
    return chosen_settings.model_copy(update={"engine": chosen_settings.engine.model_copy(update={"kind": "other"})})


def test_only_a_fixed_engine_is_built(bands, settings, tmp_path):
    ready = make_selector(bands, settings(kind="eager")).select()
    streams = min(2, host.count_usable_cores())
    assert ready.config == EngineConfig("eager", ready.config.precision, "channels_last_3d", 2, streams=streams)
    assert ready.plan is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("attributes", "engine", "warning"),
    [
        ({}, "other", None),
        ({"memory_formats": {"cuda": ("contiguous",)}}, "eager", "needs a CUDA device"),
        ({"precisions": ("fp16",)}, "eager", "does not support fp32"),
        ({"can_improve": lambda _: False}, "eager", "changes nothing in this network"),
    ],
    ids=["fits", "device", "precision", "network"],
)
def test_fixed_engine_that_is_not_suitable_is_replaced_by_eager(
    bands, settings, limit_engines, attributes, engine, warning
):
    limit_engines("eager", other=FakeBackend(lambda module: module, **attributes))
    ready = make_selector(bands, fixed(settings, precision="fp32")).select()
    assert ready.config.engine == engine
    assert ready.warnings == (() if warning is None else (f"The other engine {warning}; running eagerly.",))


def test_first_engine_in_the_known_order_is_checked_once_and_saved(bands, settings, limit_engines):
    """The progress names the engine that is being built, because this may take minutes."""
    reports, references, progress = [], [], Progress()
    limit_engines("eager", other=FakeBackend(lambda module: reports.append(str(progress)) or module))
    for cached in (False, True):
        selector = make_selector(bands, settings())
        make_reference = selector.make_reference
        selector.make_reference = lambda size, make=make_reference: references.append(size) or make(size)
        with progress.record_steps():
            ready = selector.select()
        assert (ready.config.engine, ready.is_cached, ready.plan.tuned) == ("other", cached, False)
        assert [(str(trial.verdict), trial.difference) for trial in ready.plan.trials] == [("chosen", 0)]
    assert ["building other" in text for text in reports] == [True, True]
    assert len(references) == 1


def test_comparison_is_saved_and_the_next_start_builds_only_the_winner(bands, settings, limit_engines):
    built = []
    limit_engines("eager", other=FakeBackend(lambda module: built.append(module) or module))
    first = make_selector(bands, settings(precision="fp32")).tune(60)
    assert not first.is_cached
    assert {trial.choice.engine for trial in first.plan.trials} == {"eager", "other"}
    assert [trial.choice for trial in first.plan.trials if str(trial.verdict) == "chosen"] == [first.config]
    assert {trial.difference for trial in first.plan.trials} <= {0, None}
    built.clear()
    for tune in (False, True):
        second = make_selector(bands, settings(precision="fp32", tune="first-start", tune_seconds=1)).select(tune=tune)
        assert (second.is_cached, second.config, second.plan) == (True, first.config, first.plan)
    assert len(built) == 2 * (first.config.engine == "other")


@pytest.mark.parametrize(
    ("setting", "tune", "tuned"), [("never", True, False), ("first-start", False, False), ("first-start", True, True)]
)
def test_start_compares_engines_only_if_the_setting_and_the_caller_allow_it(
    bands, settings, limit_engines, setting, tune, tuned
):
    limit_engines("eager")
    chosen_settings = settings(tune=setting, windows={"sw_batch_size": 1}, streams=1)
    assert not make_selector(bands, chosen_settings).select(tune=False).plan.tuned
    assert make_selector(bands, chosen_settings).select(tune=tune).plan.tuned == tuned


def test_stream_counts_are_tried_unless_they_are_fixed(bands, settings, limit_engines, use_two_threads):
    limit_engines(eager=FakeBackend(lambda module: lambda x: time.sleep(0.05) or module(x)))
    two, fp32 = {"sw_batch_size": 2}, "fp32"
    ready = make_selector(bands, settings(two, precision=fp32)).tune(60)
    assert ready.config.streams == ready.window.streams == 2, "sleeping networks need no core"
    assert {trial.choice.streams for trial in ready.plan.trials} == {1, 2}
    three = make_selector(bands, settings(two, precision=fp32, streams=3)).tune(60)
    assert {trial.choice.streams for trial in three.plan.trials} == {3}, "a fixed number is the only one tried"


def test_graph_that_is_not_frozen_has_one_stream(bands, settings, limit_engines):
    limit_engines("eager", compiled=FakeBackend(lambda module: module, list_compile_modes=lambda *_: ("default",)))
    assert make_selector(bands, settings(kind="compiled", freeze=False, streams=2)).select().config.streams == 1
    assert make_selector(bands, settings(kind="compiled", streams=2)).select().config.streams == 2
    plan = make_selector(bands, settings(freeze=False, streams=2)).tune(60).plan
    tried = [trial.choice for trial in plan.trials if trial.verdict.outcome != "skipped"]
    assert {(config.engine, config.streams) for config in tried} == {("compiled", 1), ("eager", 2)}


def test_changed_settings_or_weights_need_a_new_plan(bands, settings, limit_engines):
    limit_engines("eager")
    make_selector(bands, settings()).select()
    assert make_selector(bands, settings()).select().is_cached
    others = bands.model_copy(update={"weights": bands.weights.model_copy(update={"sha256": "0" * 64})})
    network = load_network(bands)
    for spec, engine in ((bands, {"tolerance": 0.01}), (bands, {"precision": "fp32"}), (others, {})):
        selector = make_selector(spec, settings(**engine), network)
        assert not selector.select().is_cached
    assert {"device", "torch", "threads", "openvino", "engines"} <= selector.collect_plan_dependencies().keys()


@pytest.mark.parametrize("choose", [EngineSelector.select, lambda selector: selector.tune(60)])
def test_faster_engine_with_different_labels_is_not_chosen(bands, settings, limit_engines, choose):
    limit_engines("eager", other=FakeBackend(lambda _module: WrongNetwork()))
    ready = choose(make_selector(bands, settings()))
    assert ready.config.engine == "eager"
    assert any(t.verdict.outcome == "wrong" for t in ready.plan.trials if t.choice.engine == "other")


def test_failing_engine_causes_a_warning_and_is_tried_at_each_start(bands, settings, limit_engines):
    limit_engines("eager", other=FakeBackend(fail_to_build))
    for _ in range(2):
        ready = make_selector(bands, settings(precision="fp32")).select()
        assert not ready.is_cached, "the next start may find a compiler"
        assert ready.config.engine == "eager"
        assert ready.warnings == ("The other engine failed: not here",)


def test_saved_plan_that_no_longer_runs_is_replaced(bands, settings, limit_engines):
    eager = backends.BACKENDS["eager"]
    limit_engines(other=FakeBackend(lambda module: module), eager=copy_with(eager, precisions=()))
    assert make_selector(bands, settings()).select().config.engine == "other"
    limit_engines(other=FakeBackend(fail_to_build), eager=eager)
    ready = make_selector(bands, settings()).select()
    assert (ready.config.engine, ready.is_cached) == ("eager", False)
    assert ready.warnings == ("The other engine failed: not here",)


def test_unwritable_cache_folder_only_prevents_saving_the_plan(bands, settings, limit_engines, tmp_path, caplog):
    limit_engines("eager")
    (tmp_path / "cache").write_text("in the way")
    assert make_selector(bands, settings()).select().plan is not None
    assert "Cannot save the engine plan" in caplog.text
    assert "engine.cache_folder" in caplog.text


def test_model_runs_eagerly_in_float32_if_no_engine_agrees(bands, settings, limit_engines):
    limit_engines("eager", other=FakeBackend(lambda module: lambda x: module(x).flip(1)))
    selector = make_selector(bands, settings(channels_last=True))
    # Eager is not a candidate here, only the fallback if all candidates fail.
    eager = backends.BACKENDS["eager"]
    limit_engines("eager", other=backends.BACKENDS["other"], eager=copy_with(eager, precisions=()))
    ready = selector.select()
    assert (ready.config.engine, ready.config.precision) == ("eager", "fp32")
    assert "runs eagerly in fp32" in ready.warnings[0]


def test_configuration_that_does_not_fit_in_memory_is_skipped(bands, settings, limit_engines):
    limit_engines("eager")
    for _ in range(2):
        ready = make_selector(bands, settings(), window_bytes=2**50).select()
        assert "GiB" in ready.warnings[0]
        assert not ready.is_cached, "the next start may have more memory"


def test_batch_sizes_are_tried_unless_they_are_fixed(bands, settings, limit_engines):
    limit_engines("eager")
    announced = []
    trials = make_selector(bands, settings()).tune(60, lambda *news: announced.append(news)).plan.trials
    assert {trial.choice.sw_batch_size for trial in trials} == {1, 2, 4}
    assert {trial.choice for trial in trials} == {config for config, _ in announced}
    assert {total for _, total in announced} == {len(announced)}
    fixed = make_selector(bands, settings(windows={"sw_batch_size": 3})).tune(60)
    assert {trial.choice.sw_batch_size for trial in fixed.plan.trials} == {3}


def test_default_batch_size_depends_on_device_and_settings(settings):
    assert choose_default_batch_size(settings(), CPU) == 2
    assert choose_default_batch_size(settings(), torch.device("cuda")) == 11
    assert choose_default_batch_size(settings(limits={"sw_batch_size": 1}), CPU) == 1
    assert choose_default_batch_size(settings(windows={"sw_batch_size": 5}), CPU) == 5


def test_model_runs_without_a_compiler(bands, settings, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    ready = make_selector(bands, settings(kind="compiled")).select()
    assert ready.config.engine == "eager"
    assert "compiled engine failed" in ready.warnings[0]


class Float32OnlyNetwork(nn.Module):
    """Network that does not run in bfloat16."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return self.network(x)


BOTH_DTYPES = frozenset({torch.bfloat16, torch.float32})


@pytest.mark.parametrize(
    ("make", "precisions", "engine"),
    [
        (lambda module: module, ("bf16", "fp32"), "other"),
        (lambda _module: fail_to_build, ("bf16", "fp32"), "eager"),
        (lambda module: module, ("fp32",), "other"),
        (lambda module: module, ("fp16",), "eager"),
    ],
    ids=["narrow fails", "all fail", "only wide", "unfit"],
)
def test_network_that_fails_in_the_lowest_precision_runs_in_the_next(
    bands, settings, limit_engines, make, precisions, engine
):
    limit_engines("eager", other=FakeBackend(make, precisions=precisions))
    ready = EngineSelector(
        bands, fixed(settings), CPU, Float32OnlyNetwork(load_network(bands)), 1000, BOTH_DTYPES
    ).select()
    assert (ready.config.engine, ready.config.precision) == (engine, "fp32")


@pytest.mark.parametrize(
    ("engine", "wrap", "expected"),
    [
        ({"tolerance": 0.5}, nn.Sequential, "bf16"),
        ({"tolerance": 0.0}, nn.Sequential, "fp32"),
        ({"tolerance": 0.5}, Float32OnlyNetwork, "fp32"),
        ({"precision": "bf16"}, nn.Sequential, "bf16"),
        ({"precision": "fp32"}, nn.Sequential, "fp32"),
    ],
    ids=["same labels", "different labels", "does not run", "bf16 set", "fp32 set"],
)
def test_eager_uses_the_lowest_precision_with_the_right_labels(bands, settings, limit_engines, engine, wrap, expected):
    limit_engines("eager")
    network = wrap(load_network(bands))
    ready = EngineSelector(bands, settings(**engine), CPU, network, 1000, BOTH_DTYPES).select()
    assert (ready.config.engine, ready.config.precision) == ("eager", expected)


def test_comparison_runs_all_streams_concurrently(bands, settings, limit_engines, use_two_threads):
    both, threads = threading.Barrier(2, timeout=20), set()

    def meet(module):
        def call(x):
            if threading.current_thread().name.startswith("stream"):
                both.wait()
                threads.add((threading.current_thread().name, torch.get_num_threads()))
            return module(x)

        return call

    limit_engines("eager", other=FakeBackend(meet))
    ready = make_selector(bands, settings({"sw_batch_size": 2}, kind="auto", streams=2)).tune(60)
    assert {cores for _, cores in threads} == {1}
    assert len(threads) >= 2
    assert all(trial.verdict.outcome != "failed" for trial in ready.plan.trials)


@pytest.mark.parametrize("uses_host_memory", [True, False])
def test_comparison_includes_decoding_only_if_it_shares_the_cores_of_the_network(bands, settings, uses_host_memory):
    batches = []

    class Counting(WrongNetwork):
        def forward(self, x):
            batches.append(len(x))
            return super().forward(x)

    chosen_settings, driver = (
        settings({"sw_batch_size": 2}, kind="eager"),
        devices if uses_host_memory else SeparateMemoryDriver(),
    )
    selector = EngineSelector(bands, chosen_settings, CPU, Counting(), 1000, frozenset({torch.float32}), driver)
    candidate = selector._make_tuner()._build(replace(selector.get_initial_config(), streams=1))
    del batches[:]
    assert isinstance(candidate.call(), Segmentation if uses_host_memory else NoneType)
    assert sum(batches) == candidate.window_count == 4


def return_nan(module):
    return lambda x: module(x) * torch.nan


@pytest.mark.parametrize(
    ("make", "options", "engine", "warning"),
    [
        (lambda _module: WrongNetwork(), {}, "eager", "The other engine in fp32 is not used: wrong"),
        # A configured precision is used even if labels change, but not if scores are wrong.
        (lambda _module: WrongNetwork(), {"precision": "fp32"}, "other", "differ from those in fp32"),
        (return_nan, {"precision": "fp32"}, "eager", "scores that are not finite"),
    ],
    ids=["different labels", "precision set", "not finite"],
)
def test_labels_of_a_fixed_engine_are_checked(bands, settings, limit_engines, tmp_path, make, options, engine, warning):
    limit_engines("eager", other=FakeBackend(make))
    ready = make_selector(bands, fixed(settings, **options)).select()
    assert (ready.config.engine, ready.plan) == (engine, None)
    assert warning in ready.warnings[0]
    assert not (tmp_path / "cache").exists()


def test_labels_do_not_matter_for_a_configured_precision(bands, settings, limit_engines):
    limit_engines("eager", other=FakeBackend(lambda _module: WrongNetwork()))
    ready = make_selector(bands, settings(precision="fp32")).select()
    (trial,) = (trial for trial in ready.plan.trials if str(trial.verdict) == "chosen")
    assert (ready.config.engine, trial.difference > 0.1) == ("other", True)


def test_fixed_engine_that_cannot_compile_runs_without_compilation(bands, settings, limit_engines):
    class Recorded(FakeBackend):
        def build(self, module, _example, config, *_):
            return fail_to_build(module) if config.compile_mode else module

    limit_engines("eager", other=Recorded(None, list_compile_modes=lambda *_: ("default", None)))
    ready = make_selector(bands, fixed(settings)).select()
    assert (ready.config.engine, ready.config.compile_mode) == ("other", None)
    assert ready.warnings == ("The other engine failed: not here",)


LARGE_BATCH = 11


def corrupt_last_window(module):
    """Return a network whose scores for the last window of a large batch are zero."""

    def call(x):
        scores = module(x).clone()
        if len(scores) == LARGE_BATCH:
            scores[-1] = 0
        return scores

    return call


def make_separate(spec, chosen_settings, native_dtypes=frozenset({torch.float32}), **options):
    return EngineSelector(
        spec, chosen_settings, CPU, load_network(spec), 1000, native_dtypes, SeparateMemoryDriver(free=2**40), **options
    )


@pytest.mark.parametrize(
    ("make", "engine"), [(corrupt_last_window, "eager"), (lambda module: module, "other")], ids=["faulty", "right"]
)
def test_engine_on_a_separate_device_is_checked_with_a_full_batch(bands, settings, limit_engines, make, engine):
    limit_engines("eager", other=FakeBackend(make))
    # A configured precision is used even if labels change, but not if scores are wrong.
    chosen_settings = settings(precision="fp32", windows={"sw_batch_size": LARGE_BATCH})
    ready = make_separate(bands, chosen_settings).select()
    assert ready.config.engine == engine
    (verdict,) = (str(trial.verdict) for trial in ready.plan.trials if trial.choice.engine == "other")
    assert ("of a full batch" in verdict) == (engine == "eager")


@pytest.mark.parametrize(("make", "windows"), [(make_separate, 1), (make_selector, LARGE_BATCH)])
def test_reference_is_created_once_and_uses_single_windows_on_a_separate_device(
    bands, settings, limit_engines, make, windows
):
    limit_engines("eager", other=FakeBackend(lambda module: module))
    selector, sizes = make(bands, settings(windows={"sw_batch_size": LARGE_BATCH})), []
    make_reference = selector.make_reference
    selector.make_reference = lambda size: sizes.append(size) or make_reference(size)
    selector.select()
    assert sizes == [windows]


OTHER = EngineConfig("other", "bf16", "contiguous", LARGE_BATCH)


def test_different_window_size_is_not_checked_on_the_host_or_in_fp32(bands, settings, limit_engines):
    limit_engines("eager", other=FakeBackend(corrupt_last_window))
    uses_host_memory = EngineSelector(bands, settings(), CPU, load_network(bands), 1000, BOTH_DTYPES)
    assert uses_host_memory.rebuild(OTHER, LARGE_BATCH).config == OTHER
    in_fp32 = replace(OTHER, precision="fp32")
    assert make_separate(bands, settings()).rebuild(in_fp32, LARGE_BATCH).config == in_fp32


@pytest.mark.parametrize(
    ("make", "engine", "expected", "message"),
    [
        (lambda module: module, {}, ("other", "bf16"), None),
        (corrupt_last_window, {}, ("eager", "fp32"), "The model runs eagerly in fp32 instead."),
        (corrupt_last_window, {"precision": "bf16"}, ("eager", "fp32"), "The model runs eagerly in fp32 instead."),
        (return_nan, {"precision": "bf16"}, ("eager", "fp32"), "not finite"),
    ],
    ids=["right", "faulty", "faulty and set", "not finite"],
)
def test_different_window_size_is_checked_with_a_full_batch(
    bands, settings, limit_engines, caplog, make, engine, expected, message
):
    limit_engines("eager", other=FakeBackend(make))
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"roi_size": (16, 32, 48)})})
    selector = make_separate(bands, settings(**engine), BOTH_DTYPES).with_window(spec, 1000)
    ready = selector.rebuild(OTHER, LARGE_BATCH)
    assert (ready.config.engine, ready.config.precision) == expected
    assert ready.window.batch.shape == (LARGE_BATCH, 1, 16, 32, 48)
    assert caplog.text == "" if message is None else (message in caplog.text and "16x32x48" in caplog.text)


FAULTY_DTYPES = {torch.bfloat16: "cuDNN 9.10.2 is installed."}


@pytest.mark.parametrize("kind", ["auto", "eager"])
@pytest.mark.parametrize(("setting", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_faulty_cudnn_causes_a_warning_at_each_start(bands, settings, limit_engines, kind, setting, expected):
    limit_engines("eager", other=FakeBackend(lambda module: module))
    for _ in range(2):
        ready = make_separate(bands, settings(kind=kind, precision=setting), faulty_dtypes=FAULTY_DTYPES).select()
        assert ready.config.precision == expected
        assert sum("cuDNN 9.10.2 is installed." in warning for warning in ready.warnings) == 1
