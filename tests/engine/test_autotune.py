import math

import pytest

from service.engine.autotune import Candidate, NothingRuns, Rules, Tuner, list_batch_sizes, list_stream_counts
from service.engine.plans import EngineConfig

EAGER = EngineConfig("eager", "fp32", "contiguous", 2)
COMPILED = EngineConfig("compiled", "fp32", "channels_last_3d", 2, "default")
NARROW = EngineConfig("eager", "bf16", "contiguous", 2)


class World:
    """A clock that only networks move. `seconds`: of one window by choice without its batch size, then of that."""

    def __init__(
        self, seconds, *, differences=None, builds=None, errors=None, per_call=0.0, cores=1, waste=0.0, disturbed=0
    ):
        self.now = 0.0
        self.seconds, self.differences, self.builds = seconds, differences or {}, builds or {}
        self.errors, self.per_call = errors or {}, per_call
        self.calls, self.cores, self.waste, self.disturbed = [], cores, waste, disturbed

    def enter(self, choice):
        self.now += self.builds.get(choice.engine, 1.0)
        if choice.engine in self.errors:
            raise self.errors[choice.engine]

        def call():
            self.calls.append(choice)
            seconds = self.seconds[choice.engine, choice.precision] * choice.sw_batch_size + self.per_call
            if choice.streams > 1 and self.disturbed:
                self.disturbed -= 1
                seconds *= 3
            self.now += seconds * max(choice.streams / self.cores, 1) * (1 + self.waste * (choice.streams - 1))

        windows = choice.streams * choice.sw_batch_size
        return Candidate(call, windows, lambda: self.differences.get((choice.engine, choice.precision), 0.0), choice)

    def tune(self, *candidates, sizes=(2,), streams=(), seconds=180.0, **options):
        tuner = Tuner(self.enter, Rules(seconds, 0.001), clock=lambda: self.now, **options)
        result, trials = tuner.run(candidates, sizes, streams)
        return result, {trial.choice: trial for trial in trials}


def test_the_fastest_wins_and_the_others_say_why_not():
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08})
    made, trials = world.tune(EAGER, COMPILED)
    assert made == COMPILED
    assert trials[COMPILED].verdict == "chosen"
    assert trials[COMPILED].windows_per_second == pytest.approx(12.5)
    assert trials[EAGER].verdict == "slower: 80% of the best"
    assert trials[EAGER].difference == 0
    assert trials[EAGER].build_seconds == pytest.approx(1)


def test_what_is_far_behind_costs_three_calls_and_no_comparison():
    world = World({("eager", "fp32"): 1.0, ("compiled", "fp32"): 0.1})
    _, trials = world.tune(COMPILED, EAGER)
    assert trials[EAGER].verdict.startswith("dropped")
    assert trials[EAGER].difference is None
    assert world.calls.count(EAGER) == 3


def test_compiling_must_bring_more_than_each_start_pays_for_it():
    made, trials = World({("eager", "fp32"): 0.102, ("compiled", "fp32"): 0.1}).tune(EAGER, COMPILED, sizes=(2, 4))
    assert made == EAGER
    assert trials[COMPILED].verdict == "hardly faster: 102% of the chosen is not worth compiling"
    assert {choice.engine for choice in trials if choice.sw_batch_size != 2} == {"eager"}
    made, _ = World({("eager", "fp32"): 0.105, ("compiled", "fp32"): 0.1}).tune(EAGER, COMPILED)
    assert made == COMPILED


def test_more_windows_at_once_must_bring_more_than_memory_is_worth():
    made, trials = World({("eager", "fp32"): 1.0}, per_call=0.03).tune(EAGER, sizes=(2, 4))
    assert made == EAGER
    more = trials[EngineConfig("eager", "fp32", "contiguous", 4)]
    assert more.verdict == "hardly faster: 101% of the chosen is not worth more windows at once"


def test_newcomers_run_in_turn_with_the_fastest_so_far():
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.1})
    world.tune(EAGER, COMPILED)
    turns = world.calls[world.calls.index(COMPILED) :]
    assert turns[:6] == [COMPILED, EAGER] * 3
    assert turns.count(COMPILED) == turns.count(EAGER)


@pytest.mark.parametrize(("difference", "word"), [(0.0011, "0.11% of the labels differ"), (math.nan, "not finite")])
def test_what_gives_other_labels_is_out_however_fast(difference, word):
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.01}, differences={("compiled", "fp32"): difference})
    made, trials = world.tune(COMPILED, EAGER)
    assert made == EAGER
    assert word in trials[COMPILED].verdict


def test_a_wider_precision_is_tried_only_where_the_narrow_one_is_wrong():
    fast = {("eager", "bf16"): 0.05, ("eager", "fp32"): 0.1}
    made, trials = World(fast).tune(NARROW, EAGER)
    assert made == NARROW
    assert trials[EAGER].verdict == "skipped: bf16 is as good"
    made, _ = World(fast, differences={("eager", "bf16"): 0.01}).tune(NARROW, EAGER)
    assert made == EAGER


@pytest.mark.parametrize("error", [RuntimeError("no\ncompiler"), OSError("no"), ImportError("no"), MemoryError("no")])
def test_what_does_not_run_is_reported_in_one_line(error):
    world = World({("eager", "fp32"): 0.1}, errors={"compiled": error})
    made, trials = world.tune(COMPILED, EAGER)
    assert made == EAGER
    assert trials[COMPILED].verdict == "failed: no"


def test_where_nothing_runs_the_reasons_are_told():
    world = World({}, errors={"compiled": RuntimeError("no compiler"), "eager": RuntimeError("broken")})
    with pytest.raises(NothingRuns, match=r"no compiler; .*broken"):
        world.tune(COMPILED, EAGER)


def test_nothing_slow_is_begun_without_the_time_for_it():
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.01})
    made, trials = world.tune(EAGER, COMPILED, seconds=20)
    assert made == EAGER
    assert "it may take 30 s" in trials[COMPILED].verdict
    assert COMPILED not in world.calls


def test_the_last_resort_is_tried_whatever_the_time():
    world = World({("eager", "fp32"): 0.1}, errors={"compiled": RuntimeError("no")}, builds={"compiled": 500.0})
    made, _ = world.tune(COMPILED, EAGER)
    assert made == EAGER


def test_a_tune_ends_in_time_whatever_is_open():
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}, builds={"compiled": 40.0})
    many = [EngineConfig("compiled", "fp32", "contiguous", 2, mode) for mode in "abcdefgh"]
    world.tune(EAGER, *many, sizes=(1, 2, 4, 8))
    assert world.now < 180 + 40


def test_what_does_not_fit_is_not_run():
    world = World({("eager", "fp32"): 0.1})
    made, trials = world.tune(
        EAGER, COMPILED, explain_skip=lambda choice: "too large" if choice.engine == "compiled" else None
    )
    assert made == EAGER
    assert trials[COMPILED].verdict == "skipped: too large"


def test_batch_sizes_grow_while_it_pays():
    world = World({("eager", "fp32"): 0.01}, per_call=0.1)
    made, trials = world.tune(EAGER, sizes=(1, 2, 4, 8))
    assert made.sw_batch_size == 8
    assert sorted(choice.sw_batch_size for choice in trials) == [2, 4, 8]


def test_batch_sizes_shrink_where_growing_does_not_pay():
    world = World({("eager", "fp32"): 0.1})
    made, trials = world.tune(EAGER, sizes=(1, 2, 4, 8))
    assert made.sw_batch_size == 1, "equally fast, and takes half of the memory"
    assert sorted(choice.sw_batch_size for choice in trials) == [1, 2, 4]


def test_streams_grow_while_it_pays():
    world = World({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.2}, cores=4)
    made, trials = world.tune(EAGER, COMPILED, sizes=(1, 2), streams=(2, 4, 8, 16))
    assert (made.engine, made.streams) == ("eager", 4)
    assert trials[made].windows_per_second == pytest.approx(40)
    assert {choice.streams for choice in trials} == {1, 2, 4, 8}
    assert {choice.streams for choice in trials if choice.engine == "compiled"} == {1}


def test_streams_that_cost_more_than_company_does_are_not_taken():
    made, trials = World({("eager", "fp32"): 0.1}, waste=0.06).tune(EAGER, streams=(2, 4))
    assert made.streams == 1
    assert {choice.streams for choice in trials} == {1, 2}


def test_all_cores_at_once_must_bring_more_than_company_costs():
    made, trials = World({("eager", "fp32"): 0.1}, waste=0.02).tune(EAGER, streams=(2, 4))
    assert made.streams == 2
    assert trials[EAGER].verdict == "hardly faster: 102% of the chosen is not worth all cores at once"


@pytest.mark.parametrize(("disturbed", "streams"), [(5, 2), (100, 1)])
def test_several_streams_may_be_disturbed_in_their_first_calls(disturbed, streams):
    world = World({("eager", "fp32"): 0.01}, cores=2, disturbed=disturbed)
    made, trials = world.tune(EAGER, streams=(2,))
    assert made.streams == streams
    assert any(trial.verdict.startswith("dropped") for trial in trials.values()) == (streams == 1)


def test_a_rate_counts_the_windows_of_a_call():
    calls = []
    tuner = Tuner(
        lambda choice: Candidate(lambda: calls.append(choice), 6, lambda: 0.0, choice),
        Rules(180, 0.001),
        clock=lambda: float(len(calls)),
    )
    (trial,) = tuner.run([EAGER], (2,)).trials
    assert trial.windows_per_second == pytest.approx(6)


def test_streams_of_a_machine():
    assert list_stream_counts(1, 8) == ()
    assert list_stream_counts(6, 8) == (2, 4)
    assert list_stream_counts(64, 8) == (2, 4, 8)


def test_batch_sizes_of_a_device():
    assert list_batch_sizes(2, 32, on_cpu=True) == (1, 2, 4)
    assert list_batch_sizes(8, 32, on_cpu=False) == (1, 2, 4, 8, 16, 32)
    assert list_batch_sizes(2, 1, on_cpu=True) == (1,)
    assert list_batch_sizes(6, 6, on_cpu=False) == (1, 2, 4, 6)


class Failing(World):
    """`last`: how often a network runs before it fails, by its engine."""

    def __init__(self, seconds, last):
        super().__init__(seconds)
        self.last = last

    def enter(self, choice):
        candidate = super().enter(choice)

        def call():
            if self.calls.count(choice) >= self.last.get(choice.engine, math.inf):
                raise RuntimeError("out of memory")
            candidate.call()

        return candidate._replace(call=call)


@pytest.mark.parametrize("last", [0, 1, 5, 10, 15])
@pytest.mark.parametrize("candidates", [(EAGER, COMPILED), (COMPILED, EAGER)])
def test_what_fails_at_any_time_is_out_and_nobody_else(last, candidates):
    world = Failing({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}, {"compiled": last})
    made, trials = world.tune(*candidates)
    assert made == EAGER
    assert trials[COMPILED].verdict == "failed: out of memory"
    assert trials[EAGER].verdict == "chosen"


def test_where_all_fail_in_the_final_nothing_runs():
    world = Failing({("eager", "fp32"): 0.1, ("compiled", "fp32"): 0.08}, {"compiled": 15, "eager": 25})
    with pytest.raises(NothingRuns, match=r"out of memory; .*out of memory"):
        world.tune(EAGER, COMPILED)


def test_a_round_has_one_round_where_no_time_is_left():
    world = World({("eager", "fp32"): 30.0, ("compiled", "fp32"): 25.0})
    world.tune(COMPILED, EAGER, seconds=100.0)
    assert world.calls.count(EAGER) == 3, "once each in its first turns, in those after them, and in the final"
