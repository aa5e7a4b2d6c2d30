"""Autotuning: the fastest of several configurations of a network, found by running them within a time limit.

Machines are shared and clocks vary, so calls are compared only with calls of the same moment: every new candidate runs
in turn with the fastest so far, and the last few run in turn with each other. The shortest of all calls counts.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from service.engine.backends import first_line, slow_build_seconds
from service.engine.plans import EngineConfig, Trial

log = logging.getLogger(__name__)

# A candidate slower than this share of the fastest in its first calls is not worth another second.
FAR_BEHIND = 0.7
# More windows at once take more memory, and must bring more than noise does.
LARGER_BATCH_GAIN = 1.02
# Compiling takes most of a start, every time, and must bring more than this.
COMPILING_GAIN = 1.03
# One stream with all cores waits at every layer for the core on which somebody else computes, where several go on:
# beside other work it falls further behind than its best calls tell, and must bring more than this.
ALL_CORES_GAIN = 1.05
FIRST_CALLS, CALLS, FINAL_CALLS = 3, 10, 12
ROUND_SECONDS, FINAL_SECONDS = 2.0, 5.0
FINALISTS = 3

_LEFT = "only"
# Beginning of the verdict on a configuration that was not tried for want of time.
OUT_OF_TIME = f"skipped: {_LEFT}"

# Errors of an engine that cannot run a network, and those of a trial, which may also take too much memory.
ENGINE_FAILURES = (RuntimeError, OSError, ImportError)
FAILURES = (*ENGINE_FAILURES, MemoryError)

Result = TypeVar("Result")


class Candidate(NamedTuple, Generic[Result]):
    """A network that has run, ready to be timed.

    call                runs `windows` windows of a request in every stream, from end to end
    measure_difference  returns its share of changed labels, NaN if any score was not finite
    result              returned where this candidate wins
    """

    call: Callable[[], object]
    windows: int
    measure_difference: Callable[[], float]
    result: Result


class Winner(NamedTuple, Generic[Result]):
    """The result of the winning candidate, and the trial of every configuration."""

    result: Result
    trials: tuple[Trial, ...]


class Rules(NamedTuple):
    """Limits of autotuning.

    seconds     after which no new trial is begun
    difference  largest share of changed labels that passes
    """

    seconds: float
    difference: float


@dataclass
class _TimedCandidate(Generic[Result]):
    """A candidate with its measurements; `shortest` is the time of its fastest call, in seconds."""

    config: EngineConfig
    candidate: Candidate[Result]
    build_seconds: float
    shortest: float = math.inf
    difference: float | None = None
    failure: Trial | None = None

    @property
    def rate(self) -> float:
        """Windows per second."""
        return self.candidate.windows / self.shortest

    @property
    def discounted_rate(self) -> float:
        """The rate, divided by the gains that compiling and a single stream must bring."""
        compiling = COMPILING_GAIN if self.config.compile_mode else 1.0
        return self.rate / compiling / (ALL_CORES_GAIN if self.config.streams == 1 else 1.0)

    def make_trial(self, verdict: str) -> Trial:
        return Trial(self.config, verdict, self.rate, self.difference, self.build_seconds)


class NothingRuns(RuntimeError):
    """No configuration ran and agreed with the reference."""


class Tuner(Generic[Result]):
    """One search for the fastest configuration.

    build         makes a candidate; one of `FAILURES` means that this configuration does not run here
    explain_skip  returns why a configuration must not be tried, None if it may
    """

    def __init__(
        self,
        build: Callable[[EngineConfig], Candidate[Result]],
        rules: Rules,
        *,
        explain_skip: Callable[[EngineConfig], str | None] = lambda _config: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build, self._rules, self._explain_skip, self._clock = build, rules, explain_skip, clock
        self._start = clock()
        self._trials: dict[EngineConfig, Trial] = {}
        self._passed: list[_TimedCandidate[Result]] = []
        self._build_seconds: dict[tuple[str, str | None], float] = {}

    def run(
        self, configs: Sequence[EngineConfig], batch_sizes: Sequence[int], streams: Sequence[int] = ()
    ) -> Winner[Result]:
        """Return the best of `configs` and of the best one's other batch sizes and streams.

        batch_sizes  ascending; those of `configs` are among them
        streams      numbers to try beside that of `configs`, ascending

        Raises NothingRuns.
        """
        for config in configs:
            self._try(config)
        self._search_batch_sizes(batch_sizes)
        self._search_streams(streams)
        best = self._run_final_round()
        for timed in self._passed:
            self._trials[timed.config] = timed.make_trial(_judge(timed, best))
        return Winner(best.candidate.result, tuple(self._trials.values()))

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._start

    def _best(self) -> _TimedCandidate[Result] | None:
        return max(self._passed, key=lambda timed: timed.discounted_rate, default=None)

    def _search_batch_sizes(self, batch_sizes: Sequence[int]) -> None:
        """Try other batch sizes of the fastest, larger ones first, in each direction for as long as it pays."""
        best = self._best()
        if best is None:
            return
        start = batch_sizes.index(best.config.sw_batch_size)
        for sizes in (batch_sizes[start + 1 :], list(reversed(batch_sizes[:start]))):
            for size in sizes:
                self._try(replace(best.config, sw_batch_size=size))
                if (faster := self._best()) is best or faster is None:
                    break
                best = faster
            if best.config.sw_batch_size > batch_sizes[start]:
                return

    def _search_streams(self, streams: Sequence[int]) -> None:
        """Try more streams for the fastest, for as long as that pays."""
        for number in streams:
            best = self._best()
            if best is None:
                return
            self._try(replace(best.config, streams=number))
            if self._best() is best:
                return

    def _try(self, config: EngineConfig) -> None:
        reason = self._explain_skipping(config)
        trial = Trial(config, f"skipped: {reason}") if reason else self._measure(config)
        self._trials[config] = trial
        rate = "" if trial.windows_per_second is None else f"{trial.windows_per_second:.1f} windows/s, "
        log.info("tuning, %.0f s: %s: %s%s", self.seconds, config, rate, trial.verdict)

    def _explain_skipping(self, config: EngineConfig) -> str | None:
        for passed in self._passed:
            same = replace(passed.config, precision=config.precision) == config
            if same and passed.config.precision != config.precision:
                return f"{passed.config.precision} is as good"
        if (reason := self._explain_skip(config)) is not None:
            return reason
        needed = self._build_seconds.get((config.engine, config.compile_mode), slow_build_seconds(config))
        left = self._rules.seconds - self.seconds
        last_resort = config.engine == "eager" and not self._passed
        if left < needed and not last_resort:
            return f"{_LEFT} {max(left, 0):.0f} s of {self._rules.seconds:g} s were left, it may take {needed:.0f} s"
        return None

    def _measure(self, config: EngineConfig) -> Trial:
        start = self._clock()
        try:
            candidate = self._build(config)
            timed = _TimedCandidate(config, candidate, self._clock() - start)
            kind = config.engine, config.compile_mode
            self._build_seconds[kind] = max(timed.build_seconds, self._build_seconds.get(kind, 0.0))
            keeps_up = self._keeps_up(timed)
            if timed.failure is not None:
                return timed.failure
            if not keeps_up:
                return timed.make_trial("dropped: far behind in its first calls")
            difference = candidate.measure_difference()
        except FAILURES as error:
            log.debug("%s does not run", config, exc_info=True)
            return _make_failed_trial(config, error)
        if math.isnan(difference):
            return timed.make_trial("wrong: scores that are not finite")
        timed.difference = difference
        if difference > self._rules.difference:
            return timed.make_trial(f"wrong: {difference:.2%} of the labels differ, {self._rules.difference:.2%} may")
        self._passed.append(timed)
        return timed.make_trial("runs")

    def _keeps_up(self, timed: _TimedCandidate[Result]) -> bool:
        """Time it in turn with the fastest so far, and return whether it is not far behind that."""
        best = self._best()
        if best is None:
            self._take_turns([timed], CALLS, ROUND_SECONDS)
            return True
        # A call of several streams is slow where any of their cores is disturbed, so a few tell little.
        patient = timed.config.streams > best.config.streams
        self._take_turns([timed, best], FIRST_CALLS, self._rules.seconds - self.seconds)
        if best.failure is None and not patient and timed.rate < FAR_BEHIND * best.rate:
            return False
        self._take_turns([timed, best], CALLS - FIRST_CALLS, ROUND_SECONDS)
        return best.failure is not None or not patient or timed.rate >= FAR_BEHIND * best.rate

    def _time_again(self, finalists: list[_TimedCandidate[Result]]) -> list[_TimedCandidate[Result]]:
        """Time several finalists in turn, from scratch; return those that do not fail. A single one needs no race."""
        if len(finalists) == 1:
            return finalists
        for timed in finalists:
            timed.shortest = math.inf
        self._take_turns(finalists, FINAL_CALLS, FINAL_SECONDS)
        return [timed for timed in finalists if timed.failure is None]

    def _run_final_round(self) -> _TimedCandidate[Result]:
        """Time the last few in turn, from scratch; return the fastest, of nearly equal ones that with fewer windows.

        Raises NothingRuns.
        """
        finalists: list[_TimedCandidate[Result]] = []
        # Where all finalists fail, those next in rank become the finalists.
        while self._passed and not finalists:
            ranking = sorted(self._passed, key=lambda timed: timed.discounted_rate, reverse=True)
            finalists = self._time_again(ranking[:FINALISTS])
        if not finalists:
            reasons = "; ".join(f"{trial.choice}: {trial.verdict}" for trial in self._trials.values())
            raise NothingRuns(f"The model runs in none of its possible ways. {reasons}")
        fastest = max(finalists, key=lambda timed: timed.discounted_rate)
        near = [timed for timed in finalists if timed.discounted_rate * LARGER_BATCH_GAIN >= fastest.discounted_rate]
        return min(near, key=lambda timed: (timed.config.sw_batch_size * timed.config.streams, -timed.discounted_rate))

    def _take_turns(self, timed_candidates: Sequence[_TimedCandidate[Result]], rounds: int, seconds: float) -> None:
        """Call each in turn, for at least one round; a candidate that fails is removed."""
        deadline = self._clock() + seconds
        for _ in range(rounds):
            for timed in timed_candidates:
                if timed.failure is None:
                    self._call(timed)
            if self._clock() > deadline:
                return

    def _call(self, timed: _TimedCandidate[Result]) -> None:
        start = self._clock()
        try:
            timed.candidate.call()
        except FAILURES as error:
            log.debug("%s runs no more", timed.config, exc_info=True)
            timed.failure = self._trials[timed.config] = _make_failed_trial(timed.config, error)
            self._passed = [passed for passed in self._passed if passed is not timed]
        else:
            timed.shortest = min(timed.shortest, self._clock() - start)


def _make_failed_trial(config: EngineConfig, error: BaseException) -> Trial:
    return Trial(config, f"failed: {first_line(error)}")


def _judge(timed: _TimedCandidate[Result], best: _TimedCandidate[Result]) -> str:
    """Return the verdict on a candidate that passed."""
    share = timed.rate / best.rate
    if timed is best:
        return "chosen"
    if share < 1:
        return f"slower: {share:.0%} of the best"
    cost = "more windows at once"
    if timed.config.compile_mode and not best.config.compile_mode:
        cost = "compiling"
    elif timed.config.streams == 1 < best.config.streams:
        cost = "all cores at once"
    return f"hardly faster: {share:.0%} of the chosen is not worth {cost}"


def list_batch_sizes(base: int, most: int, *, on_cpu: bool) -> tuple[int, ...]:
    """Return batch sizes to try around `base`, ascending: powers of two up to `most`, and no more than 4 on a CPU."""
    top = min(most, 4) if on_cpu else most
    sizes = itertools.takewhile(lambda size: size <= top, (2**power for power in itertools.count()))
    return tuple(sorted({*sizes, min(base, top)}))


def list_stream_counts(cores: int, most: int) -> tuple[int, ...]:
    """Return numbers of streams to try besides one, ascending: powers of two up to `cores` and to `most`."""
    top = min(cores, most)
    return tuple(itertools.takewhile(lambda count: count <= top, (2**power for power in itertools.count(1))))
