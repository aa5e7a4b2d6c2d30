import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from fake_backends import FakeBackend, change
from paths import ROOT
from torch import nn

from service.core import hardware
from service.core.config import Settings
from service.engine import backends
from service.engine.plans import EngineConfig
from service.inference import engine_selector
from service.inference.engine_selector import EngineSelector, batch_size
from service.models.loader import load_network

CPU = torch.device("cpu")


class Wrong(nn.Module):
    """As fast as can be, and of no use."""

    def forward(self, x):
        return x.float().repeat(1, 3, 1, 1, 1)


@pytest.fixture
def settings(tmp_path):
    """settings(**engine): `auto` unless stated, kept apart from other tests."""

    def make(windows=None, limits=None, **engine):
        sections = {"engine": {"cache_folder": tmp_path / "cache"} | engine}
        return Settings.model_validate(sections | {"windows": windows or {}, "limits": limits or {}})

    return make


@pytest.fixture
def only():
    """only(*names, **kinds): no other engines exist, besides `kinds`."""
    saved = dict(backends.BACKENDS)

    def leave(*names, **kinds):
        chosen = {name: backends.BACKENDS[name] for name in names} | kinds
        backends.BACKENDS.clear()
        backends.BACKENDS.update(chosen)

    yield leave
    backends.BACKENDS.clear()
    backends.BACKENDS.update(saved)


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


def test_a_fixed_engine_is_built_and_nothing_else(bands, settings, tmp_path):
    ready = warm_up(bands, settings(kind="eager")).run()
    assert ready.config == EngineConfig(
        "eager", ready.config.precision, "channels_last_3d", 2, streams=min(2, hardware.usable_cores())
    )
    assert ready.plan is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("attributes", "engine", "warning"),
    [
        ({}, "other", None),
        (
            {"memory_formats": {"cuda": ("contiguous",)}},
            "eager",
            "The other engine needs a CUDA device; running eagerly.",
        ),
        ({"precisions": ("fp16",)}, "eager", "The other engine does not compute in fp32; running eagerly."),
        ({"suits": lambda _: False}, "eager", "The other engine changes nothing in this network; running eagerly."),
    ],
    ids=["fits", "device", "precision", "network"],
)
def test_a_fixed_engine_that_does_not_fit_is_not_what_runs_under_its_name(
    bands, settings, only, attributes, engine, warning
):
    only("eager", other=FakeBackend(lambda module: module, **attributes))
    chosen = settings(precision="fp32")
    # A name that the settings allow for an engine of the test's own.
    chosen = chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"kind": "other"})})
    ready = warm_up(bands, chosen).run()
    assert ready.config.engine == engine
    assert ready.warnings == (() if warning is None else (warning,))


def test_what_was_tuned_is_kept_and_the_next_start_builds_only_that(bands, settings, only):
    built = []
    only("eager", other=FakeBackend(lambda module: built.append(module) or module))
    first = warm_up(bands, settings(precision="fp32")).run()
    assert not first.cached
    assert {trial.choice.engine for trial in first.plan.trials} == {"eager", "other"}
    assert [trial.choice for trial in first.plan.trials if trial.verdict == "chosen"] == [first.config]
    compared = [trial for trial in first.plan.trials if trial.difference is not None]
    assert compared
    assert max(trial.difference for trial in compared) == 0
    tries = len(built)
    second = warm_up(bands, settings(precision="fp32")).run()
    assert second.cached
    assert second.config == first.config
    assert second.plan == first.plan
    assert len(built) <= tries + 1
    again = [second, *(warm_up(bands, settings(precision="fp32")).run() for _ in range(2))]
    assert min(ready.seconds for ready in again) < first.seconds


def test_streams_are_tuned_with_what_was_built_for_one(bands, settings, only, use_two_threads):
    built = []

    class Slow(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            time.sleep(0.05)
            return self.module(x)

    only(eager=FakeBackend(lambda module: built.append(module) or Slow(module)))
    two, fp32 = {"sw_batch_size": 2}, "fp32"
    ready = warm_up(bands, settings(two, precision=fp32)).run()
    assert ready.config.streams == 2, "who sleeps needs no core"
    assert ready.window.streams == 2
    assert {trial.choice.streams for trial in ready.plan.trials} == {1, 2}
    assert len(built) == 1
    again = warm_up(bands, settings(two, precision=fp32)).run()
    assert again.cached
    assert again.window.streams == 2
    assert warm_up(bands, settings(two, precision=fp32, streams=1)).run().config.streams == 1
    three = warm_up(bands, settings(two, precision=fp32, streams=3)).run()
    assert three.config.streams == 3, "what is set is not tried otherwise"
    assert {trial.choice.streams for trial in three.plan.trials} == {3}


def test_a_graph_that_is_not_frozen_has_one_stream(bands, settings, only):
    only("eager", compiled=FakeBackend(lambda module: module, compile_modes=lambda *_: ("default",)))
    assert warm_up(bands, settings(kind="compiled", freeze=False, streams=2)).run().config.streams == 1
    assert warm_up(bands, settings(kind="compiled", streams=2)).run().config.streams == 2
    plan = warm_up(bands, settings(freeze=False, streams=2)).run().plan
    assert {(trial.choice.engine, trial.choice.streams) for trial in plan.trials} == {("compiled", 1), ("eager", 2)}


@pytest.mark.parametrize("change", [{"tolerance": 0.01}, {"precision": "fp32"}])
def test_other_settings_are_tuned_anew(bands, settings, only, change):
    only("eager")
    warm_up(bands, settings()).run()
    assert not warm_up(bands, settings(**change)).run().cached


def test_other_weights_are_tuned_anew(bands, settings):
    weights = bands.weights.model_copy(update={"sha256": "0" * 64})
    one, other = (
        warm_up(spec, settings(), load_network(bands))
        for spec in (bands, bands.model_copy(update={"weights": weights}))
    )
    assert one.circumstances() != other.circumstances()
    assert {"device", "torch", "threads", "openvino", "engines"} <= one.circumstances().keys()


def test_a_caution_about_the_engine_in_use_is_given_at_every_start(bands, settings, only):
    only("eager", other=FakeBackend(lambda module: module, caution="nobody has tried it"))
    backends.BACKENDS["eager"] = change(backends.BACKENDS["eager"], memory_formats={})
    tuned, cached = (warm_up(bands, settings()).run() for _ in range(2))
    assert cached.cached
    assert tuned.warnings == cached.warnings == ("nobody has tried it",)


def test_a_faster_engine_with_other_labels_is_not_taken(bands, settings, only):
    only("eager", other=FakeBackend(lambda _module: Wrong()))
    ready = warm_up(bands, settings()).run()
    assert ready.config.engine == "eager"
    assert any(t.verdict.startswith("wrong") for t in ready.plan.trials if t.choice.engine == "other")


def test_a_precision_that_the_operator_chose_is_not_judged(bands, settings, only):
    only("eager", other=FakeBackend(lambda _module: Wrong()))
    ready = warm_up(bands, settings(precision="fp32")).run()
    assert ready.config.engine == "other"
    (trial,) = (trial for trial in ready.plan.trials if trial.verdict == "chosen")
    assert trial.difference > 0.1


def test_an_engine_that_fails_is_warned_about_at_every_start(bands, settings, only):
    def broken(_module):
        raise RuntimeError("no compiler")

    only("eager", other=FakeBackend(broken))
    for cached in (False, True):
        ready = warm_up(bands, settings(precision="fp32")).run()
        assert ready.cached == cached
        assert ready.config.engine == "eager"
        assert ready.warnings == ("The other engine failed: no compiler",)


def test_a_kept_plan_that_no_longer_runs_is_made_again(bands, settings, only):
    runs = True

    def moody(module):
        if not runs:
            raise OSError("gone")
        return module

    eager = backends.BACKENDS["eager"]
    only(other=FakeBackend(moody), eager=change(eager, precisions=()))
    assert warm_up(bands, settings()).run().config.engine == "other"
    runs = False
    backends.BACKENDS["eager"] = eager
    ready = warm_up(bands, settings()).run()
    assert ready.config.engine == "eager"
    assert not ready.cached


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(bands, settings, only, tmp_path, caplog):
    only("eager")
    (tmp_path / "cache").write_text("in the way")
    assert warm_up(bands, settings()).run().plan is not None
    assert "cannot be kept" in caplog.text


def test_where_nothing_agrees_the_model_runs_eagerly_in_float32(bands, settings, only):
    only("eager", other=FakeBackend(lambda module: lambda x: module(x).flip(1)))
    selector = warm_up(bands, settings(channels_last=True))
    # Eager is not among the candidates, but what remains when none of them will do.
    eager = backends.BACKENDS["eager"]
    only("eager", other=backends.BACKENDS["other"], eager=change(eager, precisions=()))
    ready = selector.run()
    assert (ready.config.engine, ready.config.precision) == ("eager", "fp32")
    assert "runs eagerly in fp32" in ready.warnings[0]


def broken(_module):
    raise RuntimeError("not here")


@pytest.mark.parametrize(
    ("make", "seconds", "engine"),
    [
        (lambda module: module, 1.0, "other"),
        (lambda module: module, 60.0, "eager"),
        (lambda module: lambda x: module(x).flip(1), 1.0, "eager"),
        (broken, 1.0, "eager"),
    ],
    ids=["quick and right", "slow", "wrong", "broken"],
)
def test_on_demand_nothing_is_compared_but_what_is_quick_and_right_is_taken(
    bands, settings, only, make, seconds, engine, tmp_path
):
    only("eager", other=FakeBackend(make, slow_build_seconds=seconds))
    ready = warm_up(bands, settings()).run(tune=False)
    assert ready.config.engine == engine
    assert ready.plan is None
    assert "on demand" in ready.warnings[-1]
    assert not (tmp_path / "cache").exists()


def test_what_does_not_fit_into_memory_is_skipped_by_its_size(bands, settings, only):
    only("eager")
    trials = warm_up(bands, settings(), window_bytes=2**50).run()
    assert "GiB" in trials.warnings[0]


def test_a_plan_for_want_of_time_says_so(bands, settings, only):
    only("eager", other=change(backends.BACKENDS["eager"], slow_build_seconds=60.0))
    ready = warm_up(bands, settings(tune_seconds=1.0)).run()
    assert ready.config.engine == "eager"
    assert "engine.tune_seconds" in ready.warnings[-1]


def test_batch_sizes_are_tried_only_where_they_are_open(bands, settings, only):
    only("eager")
    sizes = {trial.choice.sw_batch_size for trial in warm_up(bands, settings()).run().plan.trials}
    assert sizes > {2}
    fixed = warm_up(bands, settings(windows={"sw_batch_size": 3})).run()
    assert {trial.choice.sw_batch_size for trial in fixed.plan.trials} == {3}


def test_the_batch_size_where_nothing_is_tuned(settings):
    assert batch_size(settings(), CPU) == 2
    assert batch_size(settings(), torch.device("cuda")) == 8
    assert batch_size(settings(limits={"sw_batch_size": 1}), CPU) == 1
    assert batch_size(settings(windows={"sw_batch_size": 5}), CPU) == 5


NO_COMPILER = """
import sys
from pathlib import Path
import torch
from service.core.config import Settings
from service.models.loader import load_network
from service.models.repository import read_spec
from service.inference.engine_selector import EngineSelector

torch.set_num_threads(1)
spec = read_spec(Path(sys.argv[1]))
settings = Settings.model_validate({"engine": {"kind": "compiled"}})
ready = EngineSelector(spec, settings, torch.device("cpu"), load_network(spec), 1).run()
assert ready.config.engine == "eager", ready
assert "compiled engine failed" in ready.warnings[0], ready
"""


def test_without_a_compiler_the_model_still_runs(bands, tmp_path):
    environment = {
        "CXX": "/nowhere/g++",
        "PATH": "",
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", NO_COMPILER, str(bands.folder)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    chosen = settings()
    chosen = chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"kind": "other"})})
    ready = EngineSelector(bands, chosen, CPU, Wide(load_network(bands)), 1000, BOTH).run()
    assert (ready.config.engine, ready.config.precision) == (engine, "fp32")


@pytest.mark.parametrize(("precision", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_on_demand_what_was_never_compared_runs_in_float32(bands, settings, only, precision, expected):
    only("eager")
    ready = EngineSelector(bands, settings(precision=precision), CPU, load_network(bands), 1000, BOTH).run(tune=False)
    assert (ready.config.engine, ready.config.precision) == ("eager", expected)


def test_streams_that_choose_other_algorithms_are_given_full_batches(bands, settings, only, use_two_threads):
    def moody(module):
        def call(x):
            time.sleep(0.05)
            return module(x) + (len(x) if torch.get_num_threads() == 1 else 0)

        return call

    eager = change(backends.BACKENDS["eager"], precisions=())
    only(eager=eager, other=FakeBackend(moody, varying_batch=True))
    selector = warm_up(bands, settings(windows={"sw_batch_size": 2}), Wrong())
    alone = EngineConfig("other", "fp32", "contiguous", 2)
    assert selector.build(alone).window.any_batch_size
    assert not selector.build(replace(alone, streams=2)).window.any_batch_size
    tuned = selector.run()
    assert tuned.config.streams == 2, "who sleeps needs no core"
    assert not tuned.window.any_batch_size


def test_plans_depend_on_what_measures_engines() -> None:
    assert all(file.is_file() for file in engine_selector.MEASURED_WITH)
