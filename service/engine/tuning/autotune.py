"""Choice among configurations of a network: the first that gives the right labels, or the fastest in a race.

Machines are shared and clocks vary, so calls are compared only with calls of the same moment: each challenger runs in
turn with the champion, and replaces it where the median of its calls is better by more than a margin.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from service.core.errors import NonFiniteScores
from service.core.telemetry import step
from service.engine.backends import ENGINE_FAILURES, first_line
from service.engine.tuning.plans import EngineConfig, Outcome, Trial, Verdict

log = logging.getLogger(__name__)

# Calls of each candidate that count, after one that does not; fewer, if that tells enough.
ROUNDS, FIRST_ROUNDS = 7, 3
# A challenger must be faster by more than this share, which is what noise may do to medians.
MARGIN = 0.03

# Errors of a trial.
FAILURES = (*ENGINE_FAILURES, MemoryError, NonFiniteScores)

Result = TypeVar("Result")


class Candidate(NamedTuple, Generic[Result]):
    """A network that has run, ready to be timed.

    call                segments `windows` windows, in all of its streams together
    measure_difference  returns its share of changed labels, NaN if any score was not finite, infinity if the scores of
                        a full batch are wrong
    result              returned where this candidate wins
    """

    call: Callable[[], object]
    windows: int
    measure_difference: Callable[[], float]
    result: Result


class Winner(NamedTuple, Generic[Result]):
    """The result of the winning candidate, and the trial of every configuration that was considered."""

    result: Result
    trials: tuple[Trial, ...]


@dataclass
class _Entrant(Generic[Result]):
    """A candidate with the right labels; `seconds` for a window are those of its calls in the latest rounds."""

    candidate: Candidate[Result]
    trial: Trial
    seconds: list[float] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        return self.trial.choice

    @property
    def rate(self) -> float | None:
        """Windows per second; None where it did not run. The first call, which finds memory, does not count."""
        return 1 / statistics.median(self.seconds[1:]) if self.seconds else None


class NothingRuns(RuntimeError):
    """No configuration ran and agreed with the reference; `trials` say why."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        reasons = "; ".join(f"{trial.choice}: {trial.verdict}" for trial in trials)
        super().__init__(f"The model runs in none of its possible ways. {reasons}")
        self.trials = tuple(trials)


class Tuner(Generic[Result]):
    """One choice of a configuration; keeps at most two candidates at the same time.

    build         makes a candidate; one of `FAILURES` means that this configuration does not run here
    difference    largest share of changed labels that passes
    seconds       after which, once one has run, no other configuration is tried, and no further round begun
    explain_skip  returns why a configuration must not be tried, None if it may
    announce      called with each configuration before it is tried, and with the number of all
    find_loss     returns what to raise where the device was lost with the error of a trial: others would only fail too
    """

    def __init__(  # noqa: PLR0913
        self,
        build: Callable[[EngineConfig], Candidate[Result]],
        difference: float,
        seconds: float = math.inf,
        *,
        explain_skip: Callable[[EngineConfig], str | None] = lambda _config: None,
        announce: Callable[[EngineConfig, int], object] = lambda _config, _total: None,
        find_loss: Callable[[BaseException], Exception | None] = lambda _error: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build, self._difference, self._limit = build, difference, seconds
        self._explain_skip, self._announce, self._clock = explain_skip, announce, clock
        self._find_loss = find_loss
        self._start = clock()
        self._trials: dict[EngineConfig, Trial] = {}
        self._champion: _Entrant[Result] | None = None
        self._total = 0

    @property
    def seconds(self) -> float:
        """Seconds since the choice began."""
        return self._clock() - self._start

    def take_first(self, configs: Sequence[EngineConfig]) -> Winner[Result]:
        """Return the first of `configs` that runs and gives the right labels. Raises NothingRuns."""
        self._total = len(configs)
        for config in configs:
            self._champion = self._enter(config)
            if self._champion is not None:
                break
        return self._winner()

    def race(self, configs: Sequence[EngineConfig], **changes: Sequence[Any]) -> Winner[Result]:
        """Return the fastest of `configs`, then of what other values of some fields make of the fastest so far.

        changes  values to try of fields of `EngineConfig`, one field after the other

        Raises NothingRuns.
        """
        self._total = len(configs) + sum(
            len({*values} - {getattr(configs[0], name)}) for name, values in changes.items()
        )
        for config in configs:
            self._challenge(config)
        for name, values in changes.items():
            for value in values:
                if self._champion is not None:
                    self._challenge(replace(self._champion.config, **{name: value}))
        if self._champion is not None and not self._champion.seconds:
            self._champion = next(iter(self._take_turns(self._champion)), None)
        return self._winner()

    def _winner(self) -> Winner[Result]:
        if self._champion is None:
            raise NothingRuns(tuple(self._trials.values()))
        self._judge(self._champion, Verdict(Outcome.CHOSEN))
        return Winner(self._champion.candidate.result, tuple(self._trials.values()))

    def _challenge(self, config: EngineConfig) -> None:
        """Let a configuration run in turn with the champion, and replace that where it is faster."""
        if config in self._trials:
            return
        with step(f"way {len(self._trials) + 1} of {self._total}"):
            if (challenger := self._enter(config)) is None:
                return
            entrants = [challenger] if self._champion is None else self._take_turns(self._champion, challenger)
        self._champion = entrants[0] if entrants else None
        if len(entrants) == 2:
            self._compare(*entrants)

    def _compare(self, champion: _Entrant[Result], challenger: _Entrant[Result]) -> None:
        share = (challenger.rate or 0) / (champion.rate or math.inf)
        loser, winner = challenger, champion
        if share > 1 + MARGIN:
            loser, winner, share = champion, challenger, 1 / share
        self._champion = winner
        self._judge(loser, Verdict(Outcome.SLOWER, f"{share:.0%} of the speed of {winner.config}"))

    def _enter(self, config: EngineConfig) -> _Entrant[Result] | None:
        """Build a configuration and check its labels; None where it is out, and its trial says why."""
        self._announce(config, self._total)
        if (reason := self._explain_skipping(config)) is not None:
            self._note(Trial(config, Verdict(Outcome.SKIPPED, reason)))
            return None
        start = self._clock()
        try:
            candidate = self._build(config)
            build_seconds = self._clock() - start
            difference = candidate.measure_difference()
        except FAILURES as error:
            log.debug("%s does not run", config, exc_info=True)
            self._note_failure(config, error)
            return None
        known = difference if math.isfinite(difference) else None
        entrant = _Entrant(candidate, Trial(config, self._check(difference), None, known, build_seconds))
        self._note(entrant.trial)
        return entrant if entrant.trial.verdict.outcome is Outcome.RUNS else None

    def _check(self, difference: float) -> Verdict:
        """Return the verdict on a candidate with this share of changed labels."""
        if math.isnan(difference):
            return Verdict(Outcome.WRONG, "scores that are not finite")
        if math.isinf(difference):
            return Verdict(Outcome.WRONG, "in a full batch, scores differ from those in fp32 by more than rounding")
        if difference > self._difference:
            return Verdict(Outcome.WRONG, f"{difference:.2%} of the labels differ, {self._difference:.2%} may")
        return Verdict(Outcome.RUNS)

    def _explain_skipping(self, config: EngineConfig) -> str | None:
        if self._champion is not None and self.seconds > self._limit:
            return "the time was up"
        for other, trial in self._trials.items():
            agrees = trial.difference is not None and trial.difference <= self._difference
            if agrees and replace(other, precision=config.precision) == config:
                return f"{other.precision} is as good"
        return self._explain_skip(config)

    def _take_turns(self, *entrants: _Entrant[Result]) -> list[_Entrant[Result]]:
        """Time entrants in turn, until the time is up or one is clearly slower; return those that did not fail."""
        running = list(entrants)
        for entrant in entrants:
            entrant.seconds.clear()
        with step("timing"):
            for done in range(1 + ROUNDS):
                if done > FIRST_ROUNDS and (self.seconds > self._limit or _is_decided(running)):
                    break
                running = [entrant for entrant in running if self._time(entrant)]
        return running

    def _time(self, entrant: _Entrant[Result]) -> bool:
        """Time one call; return whether it did not fail."""
        start = self._clock()
        try:
            entrant.candidate.call()
        except FAILURES as error:
            log.debug("%s runs no more", entrant.config, exc_info=True)
            self._note_failure(entrant.config, error)
            return False
        entrant.seconds.append((self._clock() - start) / entrant.candidate.windows)
        return True

    def _judge(self, entrant: _Entrant[Result], verdict: Verdict) -> None:
        entrant.trial = replace(entrant.trial, verdict=verdict, windows_per_second=entrant.rate)
        self._note(entrant.trial)

    def _note_failure(self, config: EngineConfig, error: BaseException) -> None:
        if (lost := self._find_loss(error)) is not None:
            raise lost from error
        self._note(Trial(config, Verdict(Outcome.FAILED, first_line(error))))

    def _note(self, trial: Trial) -> None:
        self._trials[trial.choice] = trial
        if trial.verdict.outcome is not Outcome.RUNS:
            log.debug("%s: %s", trial.choice, trial.verdict)


def _is_decided(entrants: Sequence[_Entrant[Any]]) -> bool:
    """Return whether every call of the last one took longer than all calls of the first."""
    return min(entrants[-1].seconds[1:]) > max(entrants[0].seconds[1:]) if len(entrants) > 1 else False
