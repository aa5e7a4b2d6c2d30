import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import DeviceLost, NonFiniteScores
from service.engine.tuning.autotune import (
    MAX_TIMED_ROUNDS,
    MIN_SPEED_GAIN,
    MIN_TIMED_ROUNDS,
    Candidate,
    NoWorkingConfiguration,
    Tuner,
)
from service.engine.tuning.plans import EngineConfig

EAGER = EngineConfig("eager", "fp32", "contiguous", 2)
COMPILED = EngineConfig("compiled", "fp32", "channels_last_3d", 2, "default")
EAGER_BF16 = EngineConfig("eager", "bf16", "contiguous", 2)


class Simulation:
    """Fake engines with a simulated clock that only their builds and calls advance.

    seconds               time per window by engine and precision
    calls_before_failure  number of calls after which an engine fails, by engine
    """

    def __init__(
        self,
        seconds=None,
        *,
        differences=None,
        build_seconds=1.0,
        errors=None,
        per_call=0.0,
        cores=1,
        calls_before_failure=None,
    ):
        self.now, self.calls, self.alive_calls, self.max_alive_calls = 0.0, [], set(), 0
        self.seconds, self.differences, self.build_seconds = seconds or {}, differences or {}, build_seconds
        self.errors, self.per_call, self.cores, self.calls_before_failure = (
            errors or {},
            per_call,
            cores,
            calls_before_failure or {},
        )

    def enter(self, config):
        self.now += self.build_seconds
        if config.engine in self.errors:
            raise self.errors[config.engine]
        windows = config.streams * config.sw_batch_size
        return Candidate(self.Call(self, config), windows, lambda: self.differences.get(config, 0.0), config)

    class Call:
        def __init__(self, simulation, config):
            self.simulation, self.config = simulation, config
            simulation.alive_calls.add(id(self))
            simulation.max_alive_calls = max(simulation.max_alive_calls, len(simulation.alive_calls))

        def __del__(self):
            self.simulation.alive_calls.discard(id(self))

        def __call__(self):
            simulation, config = self.simulation, self.config
            if simulation.calls.count(config) >= simulation.calls_before_failure.get(config.engine, math.inf):
                raise RuntimeError("out of memory")
            simulation.calls.append(config)
            # The first call is slow and does not count.
            slowdown = 5 if simulation.calls.count(config) == 1 else 1
            seconds = simulation.seconds[config.engine, config.precision] * config.sw_batch_size + simulation.per_call
            simulation.now += slowdown * seconds * max(config.streams / simulation.cores, 1)

    def make_tuner(self, seconds=180.0, **options):
        return Tuner(self.enter, 0.001, seconds, clock=lambda: self.now, **options)

    def find_fastest(self, *configs, seconds=180.0, changes=None, **options):
        result, trials = self.make_tuner(seconds, **options).find_fastest(configs, **(changes or {}))
        return result, {trial.choice: trial for trial in trials}


def test_fastest_configuration_wins_and_other_verdicts_hold_the_reason():
    winner, trials = Simulation({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}).find_fastest(EAGER, COMPILED)
    assert winner == COMPILED
    assert str(trials[COMPILED].verdict) == "chosen"
    assert trials[COMPILED].windows_per_second == pytest.approx(12.5)
    assert str(trials[EAGER].verdict) == f"80% of the speed of {COMPILED}"
    assert trials[EAGER].windows_per_second == pytest.approx(10)
    assert trials[EAGER].difference == 0
    assert trials[EAGER].build_seconds == pytest.approx(1)


ENGINES = [EngineConfig(f"engine {number}", "fp32", "contiguous", 2) for number in range(6)]


@given(st.lists(st.floats(0.05, 0.2), min_size=1, max_size=6))
def test_first_configuration_within_the_margin_of_the_fastest_wins(seconds):
    simulation = Simulation(
        {(config.engine, "fp32"): engine_seconds for config, engine_seconds in zip(ENGINES, seconds, strict=False)}
    )
    winner, trials = simulation.find_fastest(*ENGINES[: len(seconds)])
    winning_seconds = seconds[ENGINES.index(winner)]
    assert winning_seconds <= min(seconds) * (1 + MIN_SPEED_GAIN) * 1.0001
    assert all(
        winning_seconds * (1 + MIN_SPEED_GAIN) < earlier * 1.0001 for earlier in seconds[: ENGINES.index(winner)]
    )
    assert [trial.choice for trial in trials.values() if str(trial.verdict) == "chosen"] == [winner]
    assert simulation.max_alive_calls <= 2


@pytest.mark.parametrize(
    ("seconds", "configs", "rounds"),
    [
        ((0.1, 0.1), (EAGER,), MAX_TIMED_ROUNDS),
        ((0.1, 0.1), (EAGER, COMPILED), MAX_TIMED_ROUNDS),
        ((0.2, 0.1), (COMPILED, EAGER), MIN_TIMED_ROUNDS),
    ],
    ids=["one configuration", "equally fast", "slower in every call"],
)
def test_configurations_are_timed_alternately_until_the_result_is_clear(seconds, configs, rounds):
    simulation = Simulation({("eager", "fp32"): seconds[0], ("compiled", "fp32"): seconds[1]})
    _, trials = simulation.find_fastest(*configs)
    assert simulation.calls == [*configs] * (1 + rounds)
    assert trials[EAGER].windows_per_second == pytest.approx(1 / seconds[0])


@pytest.mark.parametrize(("difference", "detail"), [(0.0011, "0.11% of the labels differ"), (math.nan, "not finite")])
def test_configuration_with_wrong_labels_is_rejected_even_if_faster(difference, detail):
    simulation = Simulation({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.01}, differences={COMPILED: difference})
    winner, trials = simulation.find_fastest(COMPILED, EAGER)
    assert winner == EAGER
    assert detail in trials[COMPILED].verdict.detail
    assert COMPILED not in simulation.calls


def test_wider_precision_is_tried_only_if_the_narrow_one_is_wrong():
    engine_seconds = {("eager", "bf16"): 0.05, ("eager", "fp32"): 0.1}
    winner, trials = Simulation(engine_seconds).find_fastest(EAGER_BF16, EAGER)
    assert winner == EAGER_BF16
    assert str(trials[EAGER].verdict) == "skipped: bf16 already gives correct labels"
    winner, _ = Simulation(engine_seconds, differences={EAGER_BF16: 0.01}).find_fastest(EAGER_BF16, EAGER)
    assert winner == EAGER


@pytest.mark.parametrize(
    "error",
    [error("no\nmore") for error in (RuntimeError, OSError, ImportError, AssertionError, MemoryError, NonFiniteScores)],
)
def test_failure_is_reported_in_one_line(error):
    winner, trials = Simulation({("eager", "fp32"): 0.1}, errors={"compiled": error}).find_fastest(COMPILED, EAGER)
    assert winner == EAGER
    assert str(trials[COMPILED].verdict) == "failed: no"


def test_lost_device_aborts_the_tuning():
    simulation = Simulation({("eager", "fp32"): 0.1}, errors={"compiled": RuntimeError("illegal memory access")})
    with pytest.raises(DeviceLost):
        simulation.find_fastest(EAGER, COMPILED, find_device_loss=lambda error: DeviceLost(str(error)))


@pytest.mark.parametrize("choose", ["find_fastest", "choose_first"])
def test_error_lists_the_reasons_if_nothing_runs(choose):
    simulation = Simulation(errors={"compiled": RuntimeError("no compiler"), "eager": RuntimeError("broken")})
    with pytest.raises(NoWorkingConfiguration, match=r"no compiler; .*broken") as caught:
        getattr(simulation.make_tuner(), choose)([COMPILED, EAGER])
    assert [trial.choice for trial in caught.value.trials] == [COMPILED, EAGER]
    for configs in ((EAGER,), (EAGER, COMPILED)):
        simulation = Simulation(
            {("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}, calls_before_failure={"compiled": 3, "eager": 3}
        )
        with pytest.raises(NoWorkingConfiguration, match="out of memory"):
            simulation.find_fastest(*configs)


@given(st.floats(0.5, 60), st.floats(0.01, 3), st.floats(1, 300))
def test_no_configuration_is_started_after_the_time_limit(build_seconds, seconds, max_seconds):
    simulation = Simulation({(config.engine, "fp32"): seconds for config in ENGINES}, build_seconds=build_seconds)
    _, trials = simulation.find_fastest(*ENGINES, seconds=max_seconds)
    max_overrun_seconds = build_seconds + 2 * (5 + MIN_TIMED_ROUNDS) * 2 * seconds
    assert simulation.now <= 1.0001 * (max_seconds + max_overrun_seconds)
    skipped_trials = [trial for trial in trials.values() if str(trial.verdict) == "skipped: time limit reached"]
    assert simulation.calls, "at least one configuration runs"
    assert bool(skipped_trials) == (len(set(simulation.calls)) < len(ENGINES))


@pytest.mark.parametrize(("per_call", "expected_size"), [(0.1, 8), (0.001, 2)])
def test_other_batch_sizes_of_the_fastest_configuration_are_tried(per_call, expected_size):
    simulation = Simulation({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.3}, per_call=per_call)
    winner, trials = simulation.find_fastest(EAGER, COMPILED, changes={"sw_batch_size": (1, 2, 4, 8)})
    assert winner == replace(EAGER, sw_batch_size=expected_size), "a larger batch must gain more than the margin"
    assert sorted(config.sw_batch_size for config in trials if config.engine == "eager") == [1, 2, 4, 8]
    assert {config.sw_batch_size for config in trials if config.engine == "compiled"} == {2}


def test_streams_are_tried_with_the_best_batch_size():
    simulation = Simulation({("eager", "fp32"): 0.1}, per_call=0.1, cores=4)
    winner, trials = simulation.find_fastest(EAGER, changes={"sw_batch_size": (2, 4), "streams": (1, 2, 4, 8)})
    assert (winner.sw_batch_size, winner.streams) == (4, 4)
    assert {config.sw_batch_size for config in trials if config.streams > 1} == {4}


def test_configurations_are_announced_before_they_are_tried_and_skipped_ones_are_not_built():
    announcements, simulation = [], Simulation({("eager", "fp32"): 0.1})
    winner, trials = simulation.find_fastest(
        *(EAGER, COMPILED),
        changes={"streams": (1, 2)},
        announce=lambda config, total: announcements.append((config, total, simulation.now)),
        explain_skip=lambda config: "too large" if config.engine == "compiled" else None,
    )
    assert winner.engine == "eager"
    assert str(trials[COMPILED].verdict) == "skipped: too large"
    assert announcements[0] == (EAGER, 3, 0)
    assert [config for config, _, _ in announcements] == [EAGER, COMPILED, replace(EAGER, streams=2)]


@pytest.mark.parametrize("calls_before_failure", [0, 1, MIN_TIMED_ROUNDS, MAX_TIMED_ROUNDS])
@pytest.mark.parametrize("configs", [(EAGER, COMPILED), (COMPILED, EAGER)])
def test_only_the_failing_configuration_is_rejected(calls_before_failure, configs):
    simulation = Simulation(
        {("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.1}, calls_before_failure={"compiled": calls_before_failure}
    )
    winner, trials = simulation.find_fastest(*configs)
    assert winner == EAGER
    assert str(trials[COMPILED].verdict) == "failed: out of memory"
    assert str(trials[EAGER].verdict) == "chosen"


def test_choose_first_returns_the_first_correct_configuration_without_timing():
    simulation = Simulation(differences={EAGER_BF16: 0.01}, errors={"compiled": OSError("no compiler")})
    winner, trials = simulation.make_tuner().choose_first([COMPILED, EAGER_BF16, EAGER, ENGINES[0]])
    assert winner == EAGER
    assert [trial.verdict.outcome for trial in trials] == ["failed", "wrong", "chosen"]
    assert not simulation.calls
