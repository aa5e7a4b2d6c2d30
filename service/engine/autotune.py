"""The fastest of several ways to run a network, found by running them: a race within a time limit.

Machines are shared and clocks vary, so nothing is compared with what was measured a minute ago: every newcomer runs in
turn with the fastest so far, and the last few run in turn with each other. The least of all calls counts.
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

# What is slower than this share of the fastest in its first calls is not worth another second.
FAR_BEHIND = 0.7
# More windows at once take more memory, and must bring more than noise does.
WORTH_IT = 1.02
# Compiling takes most of a start, every time, and must bring more than this.
WORTH_COMPILING = 1.03
# One stream with all cores waits at every layer for the core on which somebody else computes, where several go on:
# beside other work it falls further behind than its best calls tell, and must bring more than this.
WORTH_ALL_CORES = 1.05
FIRST_CALLS, CALLS, FINAL_CALLS = 3, 10, 12
DUEL_SECONDS, FINAL_SECONDS = 2.0, 5.0
FINALISTS = 3

_LEFT = "only"
# How the verdict on what was not tried for want of time begins.
OUT_OF_TIME = f"skipped: {_LEFT}"


Made = TypeVar("Made")


class Candidate(NamedTuple, Generic[Made]):
    """A network that has run.

    call     windows of a request in every stream, from end to end
    windows  so many of them
    differs  its share of changed labels, NaN if any score was not finite
    made     what the winner is wanted for
    """

    call: Callable[[], object]
    windows: int
    differs: Callable[[], float]
    made: Made


class Winner(NamedTuple, Generic[Made]):
    """What the winner entered with, and what became of every choice."""

    made: Made
    trials: tuple[Trial, ...]


class Rules(NamedTuple):
    """seconds: after which nothing new is begun; difference: the largest share of changed labels that passes."""

    seconds: float
    difference: float


@dataclass
class _Runner(Generic[Made]):
    choice: EngineConfig
    entrant: Candidate[Made]
    build_seconds: float
    least: float = math.inf
    difference: float | None = None
    failure: Trial | None = None

    @property
    def rate(self) -> float:
        """Windows per second."""
        return self.entrant.windows / self.least

    @property
    def worth(self) -> float:
        """The rate, less what compiling must bring, and what all cores at once must."""
        compiling = WORTH_COMPILING if self.choice.compile_mode else 1.0
        return self.rate / compiling / (WORTH_ALL_CORES if self.choice.streams == 1 else 1.0)

    def trial(self, verdict: str) -> Trial:
        return Trial(self.choice, verdict, self.rate, self.difference, self.build_seconds)


# What a network raises where it does not run here.
FAILURES = (RuntimeError, OSError, ImportError, MemoryError)


class NothingRuns(RuntimeError):
    """No choice ran and agreed with the reference."""


class Tuner(Generic[Made]):
    """One race.

    enter  makes an entrant; RuntimeError, OSError, ImportError and MemoryError mean that this choice does not run here
    fits   why a choice must not even be tried, None if it may
    """

    def __init__(
        self,
        enter: Callable[[EngineConfig], Candidate[Made]],
        rules: Rules,
        *,
        fits: Callable[[EngineConfig], str | None] = lambda _choice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._enter, self._rules, self._fits, self._clock = enter, rules, fits, clock
        self._began = clock()
        self._trials: dict[EngineConfig, Trial] = {}
        self._passed: list[_Runner[Made]] = []
        self._builds: dict[tuple[str, str | None], float] = {}

    def run(
        self, candidates: Sequence[EngineConfig], batch_sizes: Sequence[int], streams: Sequence[int] = ()
    ) -> Winner[Made]:
        """The best of `candidates` and of the best one's other batch sizes and streams, and what became of each.

        batch_sizes  ascending; those of the candidates are among them
        streams      numbers to try beside that of the candidates, ascending. Raises NothingRuns.
        """
        for choice in candidates:
            self._try(choice)
        self._climb(batch_sizes)
        self._spread(streams)
        best = self._final()
        for runner in self._passed:
            self._trials[runner.choice] = runner.trial(_verdict(runner, best))
        return Winner(best.entrant.made, tuple(self._trials.values()))

    @property
    def seconds(self) -> float:
        """Since the race began."""
        return self._clock() - self._began

    def _best(self) -> _Runner[Made] | None:
        return max(self._passed, key=lambda runner: runner.worth, default=None)

    def _climb(self, batch_sizes: Sequence[int]) -> None:
        """Other batch sizes of the fastest, larger ones first, in each direction for as long as it pays."""
        best = self._best()
        if best is None:
            return
        start = batch_sizes.index(best.choice.sw_batch_size)
        for sizes in (batch_sizes[start + 1 :], list(reversed(batch_sizes[:start]))):
            for size in sizes:
                self._try(replace(best.choice, sw_batch_size=size))
                if (faster := self._best()) is best or faster is None:
                    break
                best = faster
            if best.choice.sw_batch_size > batch_sizes[start]:
                return

    def _spread(self, streams: Sequence[int]) -> None:
        """More streams for the fastest, for as long as that pays."""
        for number in streams:
            best = self._best()
            if best is None:
                return
            self._try(replace(best.choice, streams=number))
            if self._best() is best:
                return

    def _try(self, choice: EngineConfig) -> None:
        reason = self._why_not(choice)
        trial = Trial(choice, f"skipped: {reason}") if reason else self._measure(choice)
        self._trials[choice] = trial
        rate = "" if trial.windows_per_second is None else f"{trial.windows_per_second:.1f} windows/s, "
        log.info("tuning, %.0f s: %s: %s%s", self.seconds, choice, rate, trial.verdict)

    def _why_not(self, choice: EngineConfig) -> str | None:
        for passed in self._passed:
            same = replace(passed.choice, precision=choice.precision) == choice
            if same and passed.choice.precision != choice.precision:
                return f"{passed.choice.precision} is as good"
        if (reason := self._fits(choice)) is not None:
            return reason
        needed = self._builds.get((choice.engine, choice.compile_mode), slow_build_seconds(choice))
        left = self._rules.seconds - self.seconds
        last_resort = choice.engine == "eager" and not self._passed
        if left < needed and not last_resort:
            return f"{_LEFT} {max(left, 0):.0f} s of {self._rules.seconds:g} s were left, it may take {needed:.0f} s"
        return None

    def _measure(self, choice: EngineConfig) -> Trial:
        began = self._clock()
        try:
            entrant = self._enter(choice)
            runner = _Runner(choice, entrant, self._clock() - began)
            made = choice.engine, choice.compile_mode
            self._builds[made] = max(runner.build_seconds, self._builds.get(made, 0.0))
            keeps_up = self._keeps_up(runner)
            if runner.failure is not None:
                return runner.failure
            if not keeps_up:
                return runner.trial("dropped: far behind in its first calls")
            difference = entrant.differs()
        except FAILURES as error:
            log.debug("%s does not run", choice, exc_info=True)
            return _failed(choice, error)
        if math.isnan(difference):
            return runner.trial("wrong: scores that are not finite")
        runner.difference = difference
        if difference > self._rules.difference:
            return runner.trial(f"wrong: {difference:.2%} of the labels differ, {self._rules.difference:.2%} may")
        self._passed.append(runner)
        return runner.trial("runs")

    def _keeps_up(self, runner: _Runner[Made]) -> bool:
        """Whether it is worth more than its first calls, taken in turn with those of the fastest so far."""
        best = self._best()
        if best is None:
            self._take_turns([runner], CALLS, DUEL_SECONDS)
            return True
        # A call of several streams is slow where any of their cores is disturbed, so a few tell little.
        patient = runner.choice.streams > best.choice.streams
        self._take_turns([runner, best], FIRST_CALLS, self._rules.seconds - self.seconds)
        if best.failure is None and not patient and runner.rate < FAR_BEHIND * best.rate:
            return False
        self._take_turns([runner, best], CALLS - FIRST_CALLS, DUEL_SECONDS)
        return best.failure is not None or not patient or runner.rate >= FAR_BEHIND * best.rate

    def _final(self) -> _Runner[Made]:
        """The last few in turn, from scratch; of nearly equal ones the one with fewer windows per call.

        Raises NothingRuns.
        """
        finalists: list[_Runner[Made]] = []
        # Where all of them fail, those behind them are the last few.
        while self._passed and not finalists:
            ranking = sorted(self._passed, key=lambda runner: runner.worth, reverse=True)
            finalists = ranking[:FINALISTS]
            if len(finalists) > 1:
                for runner in finalists:
                    runner.least = math.inf
                self._take_turns(finalists, FINAL_CALLS, FINAL_SECONDS)
                finalists = [runner for runner in finalists if runner.failure is None]
        if not finalists:
            reasons = "; ".join(f"{trial.choice}: {trial.verdict}" for trial in self._trials.values())
            raise NothingRuns(f"The model runs in none of its possible ways. {reasons}")
        fastest = max(finalists, key=lambda runner: runner.worth)
        near = [runner for runner in finalists if runner.worth * WORTH_IT >= fastest.worth]
        return min(near, key=lambda runner: (runner.choice.sw_batch_size * runner.choice.streams, -runner.worth))

    def _take_turns(self, runners: Sequence[_Runner[Made]], rounds: int, seconds: float) -> None:
        """One round at least. Whoever fails is out of the race, whenever that is."""
        deadline = self._clock() + seconds
        for _ in range(rounds):
            for runner in runners:
                if runner.failure is None:
                    self._call(runner)
            if self._clock() > deadline:
                return

    def _call(self, runner: _Runner[Made]) -> None:
        began = self._clock()
        try:
            runner.entrant.call()
        except FAILURES as error:
            log.debug("%s runs no more", runner.choice, exc_info=True)
            runner.failure = self._trials[runner.choice] = _failed(runner.choice, error)
            self._passed = [passed for passed in self._passed if passed is not runner]
        else:
            runner.least = min(runner.least, self._clock() - began)


def _failed(choice: EngineConfig, error: BaseException) -> Trial:
    return Trial(choice, f"failed: {first_line(error)}")


def _verdict(runner: _Runner[Made], best: _Runner[Made]) -> str:
    """Of one that passed."""
    share = runner.rate / best.rate
    if runner is best:
        return "chosen"
    if share < 1:
        return f"slower: {share:.0%} of the best"
    dear = "more windows at once"
    if runner.choice.compile_mode and not best.choice.compile_mode:
        dear = "compiling"
    elif runner.choice.streams == 1 < best.choice.streams:
        dear = "all cores at once"
    return f"hardly faster: {share:.0%} of the chosen is not worth {dear}"


def batch_sizes(base: int, most: int, *, on_cpu: bool) -> tuple[int, ...]:
    """What to try around `base`, ascending: powers of two up to `most`, and no more than 4 on a CPU."""
    top = min(most, 4) if on_cpu else most
    sizes = itertools.takewhile(lambda size: size <= top, (2**power for power in itertools.count()))
    return tuple(sorted({*sizes, min(base, top)}))


def stream_counts(cores: int, most: int) -> tuple[int, ...]:
    """Numbers of streams to try besides one, ascending: powers of two, up to each core having one, at most `most`."""
    top = min(cores, most)
    return tuple(itertools.takewhile(lambda count: count <= top, (2**power for power in itertools.count(1))))
