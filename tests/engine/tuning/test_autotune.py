import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.errors import DeviceLost, NonFiniteScores
from service.engine.tuning.autotune import FIRST_ROUNDS, MARGIN, ROUNDS, Candidate, NothingRuns, Tuner
from service.engine.tuning.plans import EngineConfig

EAGER = EngineConfig("eager", "fp32", "contiguous", 2)
COMPILED = EngineConfig("compiled", "fp32", "channels_last_3d", 2, "default")
NARROW = EngineConfig("eager", "bf16", "contiguous", 2)


class World:
    """A clock that only networks move. `seconds` of a window by engine and precision; `last` call before it fails."""

    def __init__(self, seconds=None, *, differences=None, builds=1.0, errors=None, per_call=0.0, cores=1, last=None):
        self.now, self.calls, self.alive, self.most_alive = 0.0, [], set(), 0
        self.seconds, self.differences, self.builds = seconds or {}, differences or {}, builds
        self.errors, self.per_call, self.cores, self.last = errors or {}, per_call, cores, last or {}

    def enter(self, config):
        self.now += self.builds
        if config.engine in self.errors:
            raise self.errors[config.engine]
        windows = config.streams * config.sw_batch_size
        return Candidate(self.Call(self, config), windows, lambda: self.differences.get(config, 0.0), config)

    class Call:
        def __init__(self, world, config):
            self.world, self.config = world, config
            world.alive.add(id(self))
            world.most_alive = max(world.most_alive, len(world.alive))

        def __del__(self):
            self.world.alive.discard(id(self))

        def __call__(self):
            world, config = self.world, self.config
            if world.calls.count(config) >= world.last.get(config.engine, math.inf):
                raise RuntimeError("out of memory")
            world.calls.append(config)
            # The first call is slow, and does not count.
            first = 5 if world.calls.count(config) == 1 else 1
            seconds = world.seconds[config.engine, config.precision] * config.sw_batch_size + world.per_call
            world.now += first * seconds * max(config.streams / world.cores, 1)

    def make_tuner(self, seconds=180.0, **options):
        return Tuner(self.enter, 0.001, seconds, clock=lambda: self.now, **options)

    def race(self, *configs, seconds=180.0, changes=None, **options):
        result, trials = self.make_tuner(seconds, **options).race(configs, **(changes or {}))
        return result, {trial.choice: trial for trial in trials}


def test_the_fastest_wins_and_the_others_say_why_not():
    made, trials = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}).race(EAGER, COMPILED)
    assert made == COMPILED
    assert str(trials[COMPILED].verdict) == "chosen"
    assert trials[COMPILED].windows_per_second == pytest.approx(12.5)
    assert str(trials[EAGER].verdict) == f"80% of the speed of {COMPILED}"
    assert trials[EAGER].windows_per_second == pytest.approx(10)
    assert trials[EAGER].difference == 0
    assert trials[EAGER].build_seconds == pytest.approx(1)


ENGINES = [EngineConfig(f"engine {number}", "fp32", "contiguous", 2) for number in range(6)]


@given(st.lists(st.floats(0.05, 0.2), min_size=1, max_size=6))
def test_the_winner_is_within_the_margin_of_the_fastest_and_the_first_within_it_wins(seconds):
    world = World({(config.engine, "fp32"): each for config, each in zip(ENGINES, seconds, strict=False)})
    made, trials = world.race(*ENGINES[: len(seconds)])
    taken = seconds[ENGINES.index(made)]
    assert taken <= min(seconds) * (1 + MARGIN) * 1.0001
    assert all(taken * (1 + MARGIN) < earlier * 1.0001 for earlier in seconds[: ENGINES.index(made)])
    assert [trial.choice for trial in trials.values() if str(trial.verdict) == "chosen"] == [made]
    assert world.most_alive <= 2


@pytest.mark.parametrize(
    ("seconds", "configs", "rounds"),
    [
        ((0.1, 0.1), (EAGER,), ROUNDS),
        ((0.1, 0.1), (EAGER, COMPILED), ROUNDS),
        ((0.2, 0.1), (COMPILED, EAGER), FIRST_ROUNDS),
    ],
    ids=["alone", "as fast", "slower in every call"],
)
def test_challengers_run_in_turn_with_the_champion_until_that_tells_enough(seconds, configs, rounds):
    world = World({("eager", "fp32"): seconds[0], ("compiled", "fp32"): seconds[1]})
    _, trials = world.race(*configs)
    assert world.calls == [*configs] * (1 + rounds)
    assert trials[EAGER].windows_per_second == pytest.approx(1 / seconds[0])


@pytest.mark.parametrize(("difference", "word"), [(0.0011, "0.11% of the labels differ"), (math.nan, "not finite")])
def test_what_gives_other_labels_is_out_however_fast(difference, word):
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.01}, differences={COMPILED: difference})
    made, trials = world.race(COMPILED, EAGER)
    assert made == EAGER
    assert word in trials[COMPILED].verdict.detail
    assert COMPILED not in world.calls


def test_a_wider_precision_is_tried_only_where_the_narrow_one_is_wrong():
    fast = {("eager", "bf16"): 0.05, ("eager", "fp32"): 0.1}
    made, trials = World(fast).race(NARROW, EAGER)
    assert made == NARROW
    assert str(trials[EAGER].verdict) == "skipped: bf16 is as good"
    made, _ = World(fast, differences={NARROW: 0.01}).race(NARROW, EAGER)
    assert made == EAGER


@pytest.mark.parametrize(
    "error",
    [error("no\nmore") for error in (RuntimeError, OSError, ImportError, AssertionError, MemoryError, NonFiniteScores)],
)
def test_what_does_not_run_is_reported_in_one_line(error):
    made, trials = World({("eager", "fp32"): 0.1}, errors={"compiled": error}).race(COMPILED, EAGER)
    assert made == EAGER
    assert str(trials[COMPILED].verdict) == "failed: no"


def test_what_a_lost_device_cannot_run_says_nothing_about_engines():
    world = World({("eager", "fp32"): 0.1}, errors={"compiled": RuntimeError("illegal memory access")})
    with pytest.raises(DeviceLost):
        world.race(EAGER, COMPILED, find_loss=lambda error: DeviceLost(str(error)))


@pytest.mark.parametrize("choose", ["race", "take_first"])
def test_where_nothing_runs_the_reasons_are_told(choose):
    world = World(errors={"compiled": RuntimeError("no compiler"), "eager": RuntimeError("broken")})
    with pytest.raises(NothingRuns, match=r"no compiler; .*broken") as caught:
        getattr(world.make_tuner(), choose)([COMPILED, EAGER])
    assert [trial.choice for trial in caught.value.trials] == [COMPILED, EAGER]
    for configs in ((EAGER,), (EAGER, COMPILED)):
        timed = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}, last={"compiled": 3, "eager": 3})
        with pytest.raises(NothingRuns, match="out of memory"):
            timed.race(*configs)


@given(st.floats(0.5, 60), st.floats(0.01, 3), st.floats(1, 300))
def test_nothing_is_begun_when_the_time_is_up(builds, seconds, limit):
    world = World({(config.engine, "fp32"): seconds for config in ENGINES}, builds=builds)
    _, trials = world.race(*ENGINES, seconds=limit)
    longest = builds + 2 * (5 + FIRST_ROUNDS) * 2 * seconds
    assert world.now <= 1.0001 * (limit + longest)
    skipped = [trial for trial in trials.values() if str(trial.verdict) == "skipped: the time was up"]
    assert world.calls, "something has to run"
    assert bool(skipped) == (len(set(world.calls)) < len(ENGINES))


@pytest.mark.parametrize(("per_call", "best"), [(0.1, 8), (0.001, 2)])
def test_other_batch_sizes_of_the_fastest_are_tried(per_call, best):
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.3}, per_call=per_call)
    made, trials = world.race(EAGER, COMPILED, changes={"sw_batch_size": (1, 2, 4, 8)})
    assert made == replace(EAGER, sw_batch_size=best), "a larger batch must bring more than the margin"
    assert sorted(config.sw_batch_size for config in trials if config.engine == "eager") == [1, 2, 4, 8]
    assert {config.sw_batch_size for config in trials if config.engine == "compiled"} == {2}


def test_streams_are_tried_with_the_best_batch_size():
    world = World({("eager", "fp32"): 0.1}, per_call=0.1, cores=4)
    made, trials = world.race(EAGER, changes={"sw_batch_size": (2, 4), "streams": (1, 2, 4, 8)})
    assert (made.sw_batch_size, made.streams) == (4, 4)
    assert {config.sw_batch_size for config in trials if config.streams > 1} == {4}


def test_every_configuration_is_announced_before_it_is_tried_and_none_is_built_that_must_not_be():
    announced, world = [], World({("eager", "fp32"): 0.1})
    made, trials = world.race(
        *(EAGER, COMPILED),
        changes={"streams": (1, 2)},
        announce=lambda config, total: announced.append((config, total, world.now)),
        explain_skip=lambda config: "too large" if config.engine == "compiled" else None,
    )
    assert made.engine == "eager"
    assert str(trials[COMPILED].verdict) == "skipped: too large"
    assert announced[0] == (EAGER, 3, 0)
    assert [config for config, _, _ in announced] == [EAGER, COMPILED, replace(EAGER, streams=2)]


@pytest.mark.parametrize("last", [0, 1, FIRST_ROUNDS, ROUNDS])
@pytest.mark.parametrize("configs", [(EAGER, COMPILED), (COMPILED, EAGER)])
def test_what_fails_at_any_time_is_out_and_nobody_else(last, configs):
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.1}, last={"compiled": last})
    made, trials = world.race(*configs)
    assert made == EAGER
    assert str(trials[COMPILED].verdict) == "failed: out of memory"
    assert str(trials[EAGER].verdict) == "chosen"


def test_the_first_that_is_right_is_taken_and_nothing_is_timed():
    world = World(differences={NARROW: 0.01}, errors={"compiled": OSError("no compiler")})
    made, trials = world.make_tuner().take_first([COMPILED, NARROW, EAGER, ENGINES[0]])
    assert made == EAGER
    assert [trial.verdict.outcome for trial in trials] == ["failed", "wrong", "chosen"]
    assert not world.calls
