import threading
import time
from dataclasses import replace
from types import NoneType

import pytest
import torch
from fake_backends import FakeBackend, change
from fakes import SeparateDevice
from torch import nn

from service.core.config import Settings
from service.core.hardware import devices, host
from service.core.telemetry import Progress
from service.core.types import Segmentation
from service.engine import backends
from service.engine.tuning.plans import EngineConfig
from service.inference.runner.engine_builder import default_batch_size
from service.inference.runner.selector import EngineSelector
from service.models.loader import load_network

CPU = torch.device("cpu")


class Wrong(nn.Module):
    """As fast as can be, and of no use."""

    def forward(self, x):
        return x.float().repeat(1, 3, 1, 1, 1)


def broken(_module):
    raise RuntimeError("not here")


@pytest.fixture
def settings(tmp_path):
    """settings(**engine): `auto` unless stated, kept apart from other tests."""

    def make(windows=None, limits=None, **engine):
        sections = {"engine": {"cache_folder": tmp_path / "cache"} | engine}
        return Settings.model_validate(sections | {"windows": windows or {}, "limits": limits or {}})

    return make


@pytest.fixture
def only(monkeypatch):
    """only(*names, **kinds): no other engines exist, besides `kinds`."""

    def leave(*names, **kinds):
        monkeypatch.setattr(backends, "BACKENDS", {name: backends.BACKENDS[name] for name in names} | kinds)

    return leave


@pytest.fixture
def use_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def warm_up(spec, chosen, network=None, window_bytes=1000):
    # Whatever else this machine computes: a narrow precision is another race, with other labels.
    native = frozenset({torch.float32})
    return EngineSelector(spec, chosen, CPU, load_network(spec) if network is None else network, window_bytes, native)


def fixed(settings, **engine):
    """Settings with the engine of a test's own, whose name the configuration does not know."""
    chosen = settings(**engine)
    return chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"kind": "other"})})


def test_a_fixed_engine_is_built_and_nothing_else(bands, settings, tmp_path):
    ready = warm_up(bands, settings(kind="eager")).run()
    streams = min(2, host.usable_cores())
    assert ready.config == EngineConfig("eager", ready.config.precision, "channels_last_3d", 2, streams=streams)
    assert ready.plan is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("attributes", "engine", "warning"),
    [
        ({}, "other", None),
        ({"memory_formats": {"cuda": ("contiguous",)}}, "eager", "needs a CUDA device"),
        ({"precisions": ("fp16",)}, "eager", "does not compute in fp32"),
        ({"suits": lambda _: False}, "eager", "changes nothing in this network"),
    ],
    ids=["fits", "device", "precision", "network"],
)
def test_a_fixed_engine_that_does_not_fit_is_not_what_runs_under_its_name(
    bands, settings, only, attributes, engine, warning
):
    only("eager", other=FakeBackend(lambda module: module, **attributes))
    ready = warm_up(bands, fixed(settings, precision="fp32")).run()
    assert ready.config.engine == engine
    assert ready.warnings == (() if warning is None else (f"The other engine {warning}; running eagerly.",))


def test_the_first_of_the_known_order_is_checked_once_and_kept(bands, settings, only):
    """A start says what it builds, as that may take minutes."""
    told, references, progress = [], [], Progress()
    only("eager", other=FakeBackend(lambda module: told.append(str(progress)) or module))
    for cached in (False, True):
        selector = warm_up(bands, settings())
        make_reference = selector.reference
        selector.reference = lambda size, make=make_reference: references.append(size) or make(size)
        with progress.follow():
            ready = selector.run()
        assert (ready.config.engine, ready.cached, ready.plan.tuned) == ("other", cached, False)
        assert [(str(trial.verdict), trial.difference) for trial in ready.plan.trials] == [("chosen", 0)]
    assert ["building other" in text for text in told] == [True, True]
    assert len(references) == 1


def test_a_race_is_kept_and_the_next_start_builds_only_what_won(bands, settings, only):
    built = []
    only("eager", other=FakeBackend(lambda module: built.append(module) or module))
    first = warm_up(bands, settings(precision="fp32")).tune(60)
    assert not first.cached
    assert {trial.choice.engine for trial in first.plan.trials} == {"eager", "other"}
    assert [trial.choice for trial in first.plan.trials if str(trial.verdict) == "chosen"] == [first.config]
    assert {trial.difference for trial in first.plan.trials} <= {0, None}
    built.clear()
    for tune in (False, True):
        second = warm_up(bands, settings(precision="fp32", tune="first-start", tune_seconds=1)).run(tune=tune)
        assert (second.cached, second.config, second.plan) == (True, first.config, first.plan)
    assert len(built) == 2 * (first.config.engine == "other")


@pytest.mark.parametrize(
    ("setting", "tune", "tuned"), [("never", True, False), ("first-start", False, False), ("first-start", True, True)]
)
def test_a_start_races_only_where_that_is_set_and_there_is_time(bands, settings, only, setting, tune, tuned):
    only("eager")
    chosen = settings(tune=setting, windows={"sw_batch_size": 1}, streams=1)
    assert not warm_up(bands, chosen).run(tune=False).plan.tuned
    assert warm_up(bands, chosen).run(tune=tune).plan.tuned == tuned


def test_streams_are_tried_where_they_are_open(bands, settings, only, use_two_threads):
    only(eager=FakeBackend(lambda module: lambda x: time.sleep(0.05) or module(x)))
    two, fp32 = {"sw_batch_size": 2}, "fp32"
    ready = warm_up(bands, settings(two, precision=fp32)).tune(60)
    assert ready.config.streams == ready.window.streams == 2, "who sleeps needs no core"
    assert {trial.choice.streams for trial in ready.plan.trials} == {1, 2}
    three = warm_up(bands, settings(two, precision=fp32, streams=3)).tune(60)
    assert {trial.choice.streams for trial in three.plan.trials} == {3}, "what is set is not tried otherwise"


def test_a_graph_that_is_not_frozen_has_one_stream(bands, settings, only):
    only("eager", compiled=FakeBackend(lambda module: module, compile_modes=lambda *_: ("default",)))
    assert warm_up(bands, settings(kind="compiled", freeze=False, streams=2)).run().config.streams == 1
    assert warm_up(bands, settings(kind="compiled", streams=2)).run().config.streams == 2
    plan = warm_up(bands, settings(freeze=False, streams=2)).tune(60).plan
    tried = [trial.choice for trial in plan.trials if trial.verdict.outcome != "skipped"]
    assert {(config.engine, config.streams) for config in tried} == {("compiled", 1), ("eager", 2)}


def test_other_settings_and_other_weights_are_checked_anew(bands, settings, only):
    only("eager")
    warm_up(bands, settings()).run()
    assert warm_up(bands, settings()).run().cached
    others = bands.model_copy(update={"weights": bands.weights.model_copy(update={"sha256": "0" * 64})})
    network = load_network(bands)
    for spec, engine in ((bands, {"tolerance": 0.01}), (bands, {"precision": "fp32"}), (others, {})):
        selector = warm_up(spec, settings(**engine), network)
        assert not selector.run().cached
    assert {"device", "torch", "threads", "openvino", "engines"} <= selector.circumstances().keys()


@pytest.mark.parametrize("choose", [EngineSelector.run, lambda selector: selector.tune(60)])
def test_a_faster_engine_with_other_labels_is_not_taken(bands, settings, only, choose):
    only("eager", other=FakeBackend(lambda _module: Wrong()))
    ready = choose(warm_up(bands, settings()))
    assert ready.config.engine == "eager"
    assert any(t.verdict.outcome == "wrong" for t in ready.plan.trials if t.choice.engine == "other")


def test_an_engine_that_fails_is_warned_about_and_tried_at_every_start(bands, settings, only):
    only("eager", other=FakeBackend(broken))
    for _ in range(2):
        ready = warm_up(bands, settings(precision="fp32")).run()
        assert not ready.cached, "the next start may find a compiler"
        assert ready.config.engine == "eager"
        assert ready.warnings == ("The other engine failed: not here",)


def test_a_kept_plan_that_no_longer_runs_is_made_again(bands, settings, only):
    eager = backends.BACKENDS["eager"]
    only(other=FakeBackend(lambda module: module), eager=change(eager, precisions=()))
    assert warm_up(bands, settings()).run().config.engine == "other"
    only(other=FakeBackend(broken), eager=eager)
    ready = warm_up(bands, settings()).run()
    assert (ready.config.engine, ready.cached) == ("eager", False)
    assert ready.warnings == ("The other engine failed: not here",)


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(bands, settings, only, tmp_path, caplog):
    only("eager")
    (tmp_path / "cache").write_text("in the way")
    assert warm_up(bands, settings()).run().plan is not None
    assert "cannot be kept" in caplog.text
    assert "engine.cache_folder" in caplog.text


def test_where_nothing_agrees_the_model_runs_eagerly_in_float32(bands, settings, only):
    only("eager", other=FakeBackend(lambda module: lambda x: module(x).flip(1)))
    selector = warm_up(bands, settings(channels_last=True))
    # Eager is not among the candidates, but what remains when none of them will do.
    eager = backends.BACKENDS["eager"]
    only("eager", other=backends.BACKENDS["other"], eager=change(eager, precisions=()))
    ready = selector.run()
    assert (ready.config.engine, ready.config.precision) == ("eager", "fp32")
    assert "runs eagerly in fp32" in ready.warnings[0]


def test_what_does_not_fit_into_memory_is_skipped_by_its_size(bands, settings, only):
    only("eager")
    for _ in range(2):
        ready = warm_up(bands, settings(), window_bytes=2**50).run()
        assert "GiB" in ready.warnings[0]
        assert not ready.cached, "the next start may have more memory"


def test_batch_sizes_are_tried_only_where_they_are_open(bands, settings, only):
    only("eager")
    announced = []
    trials = warm_up(bands, settings()).tune(60, lambda *news: announced.append(news)).plan.trials
    assert {trial.choice.sw_batch_size for trial in trials} == {1, 2, 4}
    assert {trial.choice for trial in trials} == {config for config, _ in announced}
    assert {total for _, total in announced} == {len(announced)}
    fixed = warm_up(bands, settings(windows={"sw_batch_size": 3})).tune(60)
    assert {trial.choice.sw_batch_size for trial in fixed.plan.trials} == {3}


def test_the_batch_size_of_a_device(settings):
    assert default_batch_size(settings(), CPU) == 2
    assert default_batch_size(settings(), torch.device("cuda")) == 11
    assert default_batch_size(settings(limits={"sw_batch_size": 1}), CPU) == 1
    assert default_batch_size(settings(windows={"sw_batch_size": 5}), CPU) == 5


def test_without_a_compiler_the_model_still_runs(bands, settings, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    ready = warm_up(bands, settings(kind="compiled")).run()
    assert ready.config.engine == "eager"
    assert "compiled engine failed" in ready.warnings[0]


class Wide(nn.Module):
    """Does not run in bfloat16."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return self.network(x)


BOTH = frozenset({torch.bfloat16, torch.float32})


@pytest.mark.parametrize(
    ("make", "precisions", "engine"),
    [
        (lambda module: module, ("bf16", "fp32"), "other"),
        (lambda _module: broken, ("bf16", "fp32"), "eager"),
        (lambda module: module, ("fp32",), "other"),
        (lambda module: module, ("fp16",), "eager"),
    ],
    ids=["narrow fails", "all fail", "only wide", "unfit"],
)
def test_a_network_that_does_not_run_in_the_narrowest_precision_runs_in_the_next(
    bands, settings, only, make, precisions, engine
):
    only("eager", other=FakeBackend(make, precisions=precisions))
    ready = EngineSelector(bands, fixed(settings), CPU, Wide(load_network(bands)), 1000, BOTH).run()
    assert (ready.config.engine, ready.config.precision) == (engine, "fp32")


@pytest.mark.parametrize(
    ("engine", "wrap", "expected"),
    [
        ({"tolerance": 0.5}, nn.Sequential, "bf16"),
        ({"tolerance": 0.0}, nn.Sequential, "fp32"),
        ({"tolerance": 0.5}, Wide, "fp32"),
        ({"precision": "bf16"}, nn.Sequential, "bf16"),
        ({"precision": "fp32"}, nn.Sequential, "fp32"),
    ],
    ids=["same labels", "other labels", "does not run", "bf16 set", "fp32 set"],
)
def test_eager_runs_in_the_narrowest_precision_that_gives_the_labels(bands, settings, only, engine, wrap, expected):
    only("eager")
    network = wrap(load_network(bands))
    ready = EngineSelector(bands, settings(**engine), CPU, network, 1000, BOTH).run()
    assert (ready.config.engine, ready.config.precision) == ("eager", expected)


def test_a_race_segments_in_all_streams_at_the_same_time(bands, settings, only, use_two_threads):
    both, threads = threading.Barrier(2, timeout=20), set()

    def meet(module):
        def call(x):
            if threading.current_thread().name.startswith("stream"):
                both.wait()
                threads.add((threading.current_thread().name, torch.get_num_threads()))
            return module(x)

        return call

    only("eager", other=FakeBackend(meet))
    ready = warm_up(bands, settings({"sw_batch_size": 2}, kind="auto", streams=2)).tune(60)
    assert {cores for _, cores in threads} == {1}
    assert len(threads) >= 2
    assert all(trial.verdict.outcome != "failed" for trial in ready.plan.trials)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_race_times_decoding_only_where_the_network_runs_on_the_same_cores(bands, settings, on_host):
    batches = []

    class Counting(Wrong):
        def forward(self, x):
            batches.append(len(x))
            return super().forward(x)

    chosen, driver = settings({"sw_batch_size": 2}, kind="eager"), devices if on_host else SeparateDevice()
    selector = EngineSelector(bands, chosen, CPU, Counting(), 1000, frozenset({torch.float32}), driver)
    candidate = selector._make_tuner()._build(replace(selector.preliminary(), streams=1))
    del batches[:]
    assert isinstance(candidate.call(), Segmentation if on_host else NoneType)
    assert sum(batches) == candidate.windows == 4


def not_finite(module):
    return lambda x: module(x) * torch.nan


@pytest.mark.parametrize(
    ("make", "options", "engine", "warning"),
    [
        (lambda _module: Wrong(), {}, "eager", "The other engine in fp32 is not used: wrong"),
        # A precision that the operator chose is used whatever labels change, but with no other scores.
        (lambda _module: Wrong(), {"precision": "fp32"}, "other", "differ from those in fp32"),
        (not_finite, {"precision": "fp32"}, "eager", "scores that are not finite"),
    ],
    ids=["other labels", "precision set", "not finite"],
)
def test_a_fixed_engine_is_judged_by_its_labels(bands, settings, only, tmp_path, make, options, engine, warning):
    only("eager", other=FakeBackend(make))
    ready = warm_up(bands, fixed(settings, **options)).run()
    assert (ready.config.engine, ready.plan) == (engine, None)
    assert warning in ready.warnings[0]
    assert not (tmp_path / "cache").exists()


def test_what_the_operator_chose_is_not_judged_where_the_engine_is_open_either(bands, settings, only):
    only("eager", other=FakeBackend(lambda _module: Wrong()))
    ready = warm_up(bands, settings(precision="fp32")).run()
    (trial,) = (trial for trial in ready.plan.trials if str(trial.verdict) == "chosen")
    assert (ready.config.engine, trial.difference > 0.1) == ("other", True)


def test_a_fixed_engine_that_cannot_compile_runs_as_it_is(bands, settings, only):
    class Recorded(FakeBackend):
        def build(self, module, _example, config, *_):
            return broken(module) if config.compile_mode else module

    only("eager", other=Recorded(None, compile_modes=lambda *_: ("default", None)))
    ready = warm_up(bands, fixed(settings)).run()
    assert (ready.config.engine, ready.config.compile_mode) == ("other", None)
    assert ready.warnings == ("The other engine failed: not here",)


LARGE_BATCH = 11


def faulty_at_the_end(module):
    """A network whose scores of the last window of a large batch are zero."""

    def call(x):
        scores = module(x).clone()
        if len(scores) == LARGE_BATCH:
            scores[-1] = 0
        return scores

    return call


def on_separate_device(spec, chosen, native=frozenset({torch.float32}), **more):
    return EngineSelector(spec, chosen, CPU, load_network(spec), 1000, native, SeparateDevice(free=2**40), **more)


@pytest.mark.parametrize(
    ("make", "engine"), [(faulty_at_the_end, "eager"), (lambda module: module, "other")], ids=["faulty", "right"]
)
def test_a_separate_device_is_checked_with_a_full_batch(bands, settings, only, make, engine):
    only("eager", other=FakeBackend(make))
    # A precision that is set is used whatever labels change, but not with scores that are wrong.
    chosen = settings(precision="fp32", windows={"sw_batch_size": LARGE_BATCH})
    ready = on_separate_device(bands, chosen).run()
    assert ready.config.engine == engine
    (verdict,) = (str(trial.verdict) for trial in ready.plan.trials if trial.choice.engine == "other")
    assert ("in a full batch" in verdict) == (engine == "eager")


@pytest.mark.parametrize(("make", "windows"), [(on_separate_device, 1), (warm_up, LARGE_BATCH)])
def test_the_reference_is_made_once_and_computes_one_window_at_a_time_on_a_separate_device(
    bands, settings, only, make, windows
):
    only("eager", other=FakeBackend(lambda module: module))
    selector, sizes = make(bands, settings(windows={"sw_batch_size": LARGE_BATCH})), []
    make_reference = selector.reference
    selector.reference = lambda size: sizes.append(size) or make_reference(size)
    selector.run()
    assert sizes == [windows]


OTHER = EngineConfig("other", "bf16", "contiguous", LARGE_BATCH)


@pytest.mark.parametrize(
    ("make", "engine", "expected", "message"),
    [
        (lambda module: module, {}, ("other", "bf16"), None),
        (faulty_at_the_end, {}, ("eager", "fp32"), "It runs eagerly in fp32 instead."),
        (faulty_at_the_end, {"precision": "bf16"}, ("eager", "fp32"), "It runs eagerly in fp32 instead."),
        (not_finite, {"precision": "bf16"}, ("eager", "fp32"), "not finite"),
    ],
    ids=["right", "faulty", "faulty and set", "not finite"],
)
def test_another_window_is_checked_with_a_full_batch(bands, settings, only, caplog, make, engine, expected, message):
    only("eager", other=FakeBackend(make))
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"roi_size": (16, 32, 48)})})
    selector = on_separate_device(bands, settings(**engine), BOTH).with_window(spec, 1000)
    ready = selector.rebuild(OTHER, LARGE_BATCH)
    assert (ready.config.engine, ready.config.precision) == expected
    # On the host, and in fp32, it needs no check.
    on_host = EngineSelector(bands, settings(**engine), CPU, load_network(bands), 1000, BOTH)
    assert on_host.rebuild(OTHER, LARGE_BATCH).config == OTHER
    in_fp32 = replace(OTHER, precision="fp32")
    assert on_separate_device(bands, settings()).rebuild(in_fp32, LARGE_BATCH).config == in_fp32
    assert ready.window.batch.shape == (LARGE_BATCH, 1, 16, 32, 48)
    assert caplog.text == "" if message is None else (message in caplog.text and "16x32x48" in caplog.text)


FAULTY = {torch.bfloat16: "cuDNN 9.10.2 is installed."}


@pytest.mark.parametrize("kind", ["auto", "eager"])
@pytest.mark.parametrize(("setting", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_a_faulty_cudnn_is_warned_about_at_every_start(bands, settings, only, kind, setting, expected):
    only("eager", other=FakeBackend(lambda module: module))
    for _ in range(2):
        ready = on_separate_device(bands, settings(kind=kind, precision=setting), faulty=FAULTY).run()
        assert ready.config.precision == expected
        assert sum("cuDNN 9.10.2 is installed." in warning for warning in ready.warnings) == 1
