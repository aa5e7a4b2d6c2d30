"""Choose an engine configuration: the first one with correct labels, or the fastest of several.

Machines are shared and clock rates vary, so only calls made at about the same time are compared. Each challenger runs
alternately with the fastest configuration so far, and replaces it if its median time is shorter by more than a margin.
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
from service.engine.backends import ENGINE_ERRORS, get_first_line
from service.engine.tuning.plans import EngineConfig, Outcome, Trial, Verdict

log = logging.getLogger(__name__)

# Maximum number of timed calls to each candidate, after one call that is not counted.
MAX_TIMED_ROUNDS = 7
# Minimum number of timed calls before a comparison may end early, because the result is clear or time is up.
MIN_TIMED_ROUNDS = 3
# A challenger must be faster by more than this fraction, because noise can change medians by that much.
MIN_SPEED_GAIN = 0.03

# Errors that make a trial fail.
TRIAL_ERRORS = (*ENGINE_ERRORS, MemoryError, NonFiniteScores)

Result = TypeVar("Result")


class Candidate(NamedTuple, Generic[Result]):
    """A network that was built and can be timed.

    call                function that runs the network on `window_count` windows, in all streams together
    measure_difference  function that returns the fraction of changed labels, NaN if any score was not finite, or
                        infinity if the scores of a full batch are wrong
    result              object to return if this candidate wins
    """

    call: Callable[[], object]
    window_count: int
    measure_difference: Callable[[], float]
    result: Result


class Winner(NamedTuple, Generic[Result]):
    """The result of the winning candidate, and the trials of all configurations that were considered."""

    result: Result
    trials: tuple[Trial, ...]


@dataclass
class _Entrant(Generic[Result]):
    """A candidate with correct labels, and the seconds per window of each call in the latest comparison."""

    candidate: Candidate[Result]
    trial: Trial
    seconds_per_window: list[float] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        return self.trial.choice

    @property
    def windows_per_second(self) -> float | None:
        """Speed, or None if it was not measured. The first call also allocates memory, so it is not counted."""
        return 1 / statistics.median(self.seconds_per_window[1:]) if self.seconds_per_window else None


class NoWorkingConfiguration(RuntimeError):
    """No configuration both ran and agreed with the reference. `trials` contains the reasons."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        reasons = "; ".join(f"{trial.choice}: {trial.verdict}" for trial in trials)
        super().__init__(f"No engine configuration can run this model correctly on this machine. {reasons}")
        self.trials = tuple(trials)


class Tuner(Generic[Result]):
    """A search for the best configuration. At most two candidates are in memory at the same time.

    build             function that builds a candidate; it raises one of `TRIAL_ERRORS` if the configuration does not
                      work
    max_difference    maximum accepted fraction of changed labels
    max_seconds       time limit, after which no further configuration or round is started, if at least one
                      configuration has run
    explain_skip      function that returns why a configuration must not be tried, or None
    announce          function called before each trial, with the configuration and the total number of configurations
    find_device_loss  function that returns the exception to raise if an error means that the device was lost, or None;
                      after a loss, all later trials would fail too
    """

    def __init__(  # noqa: PLR0913
        self,
        build: Callable[[EngineConfig], Candidate[Result]],
        max_difference: float,
        max_seconds: float = math.inf,
        *,
        explain_skip: Callable[[EngineConfig], str | None] = lambda _config: None,
        announce: Callable[[EngineConfig, int], object] = lambda _config, _config_count: None,
        find_device_loss: Callable[[BaseException], Exception | None] = lambda _error: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._build, self._max_difference, self._max_seconds = build, max_difference, max_seconds
        self._explain_skip, self._announce, self._clock = explain_skip, announce, clock
        self._find_device_loss = find_device_loss
        self._start_time = clock()
        self._trials: dict[EngineConfig, Trial] = {}
        self._champion: _Entrant[Result] | None = None
        self._config_count = 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the tuner was created."""
        return self._clock() - self._start_time

    def choose_first(self, configs: Sequence[EngineConfig]) -> Winner[Result]:
        """Return the first of `configs` that runs and gives correct labels. Raises NoWorkingConfiguration."""
        self._config_count = len(configs)
        for config in configs:
            self._champion = self._build_entrant(config)
            if self._champion is not None:
                break
        return self._make_winner()

    def find_fastest(self, configs: Sequence[EngineConfig], **changes: Sequence[Any]) -> Winner[Result]:
        """Return the fastest of `configs`, or a variant of it that is even faster.

        changes  fields of `EngineConfig` and the values to try for them, one field after the other

        Raises NoWorkingConfiguration if no configuration runs and gives correct labels.
        """
        self._config_count = len(configs) + sum(
            len({*values} - {getattr(configs[0], name)}) for name, values in changes.items()
        )
        for config in configs:
            self._challenge(config)
        for name, values in changes.items():
            for value in values:
                if self._champion is not None:
                    self._challenge(replace(self._champion.config, **{name: value}))
        if self._champion is not None and not self._champion.seconds_per_window:
            self._champion = next(iter(self._time_alternately(self._champion)), None)
        return self._make_winner()

    def _make_winner(self) -> Winner[Result]:
        if self._champion is None:
            raise NoWorkingConfiguration(tuple(self._trials.values()))
        self._record_verdict(self._champion, Verdict(Outcome.CHOSEN))
        return Winner(self._champion.candidate.result, tuple(self._trials.values()))

    def _challenge(self, config: EngineConfig) -> None:
        """Compare a configuration with the fastest one so far, and make the faster one the champion."""
        if config in self._trials:
            return
        with step(f"configuration {len(self._trials) + 1} of {self._config_count}"):
            if (challenger := self._build_entrant(config)) is None:
                return
            entrants = [challenger] if self._champion is None else self._time_alternately(self._champion, challenger)
        self._champion = entrants[0] if entrants else None
        if len(entrants) == 2:
            self._compare(*entrants)

    def _compare(self, champion: _Entrant[Result], challenger: _Entrant[Result]) -> None:
        speed_ratio = (challenger.windows_per_second or 0) / (champion.windows_per_second or math.inf)
        loser, winner = challenger, champion
        if speed_ratio > 1 + MIN_SPEED_GAIN:
            loser, winner, speed_ratio = champion, challenger, 1 / speed_ratio
        self._champion = winner
        self._record_verdict(loser, Verdict(Outcome.SLOWER, f"{speed_ratio:.0%} of the speed of {winner.config}"))

    def _build_entrant(self, config: EngineConfig) -> _Entrant[Result] | None:
        """Build a configuration and check its labels. Return None and record the reason if it is rejected."""
        self._announce(config, self._config_count)
        if (reason := self._find_skip_reason(config)) is not None:
            self._record(Trial(config, Verdict(Outcome.SKIPPED, reason)))
            return None
        start_time = self._clock()
        try:
            candidate = self._build(config)
            build_seconds = self._clock() - start_time
            difference = candidate.measure_difference()
        except TRIAL_ERRORS as error:
            log.debug("%s failed", config, exc_info=True)
            self._record_failure(config, error)
            return None
        finite_difference = difference if math.isfinite(difference) else None
        entrant = _Entrant(
            candidate, Trial(config, self._check_difference(difference), None, finite_difference, build_seconds)
        )
        self._record(entrant.trial)
        return entrant if entrant.trial.verdict.outcome is Outcome.RUNS else None

    def _check_difference(self, difference: float) -> Verdict:
        """Return the verdict on a candidate with this fraction of changed labels."""
        if math.isnan(difference):
            return Verdict(Outcome.WRONG, "scores that are not finite")
        if math.isinf(difference):
            return Verdict(
                Outcome.WRONG, "the scores of a full batch differ from fp32 scores by more than rounding errors"
            )
        if difference > self._max_difference:
            return Verdict(
                Outcome.WRONG, f"{difference:.2%} of the labels differ; the limit is {self._max_difference:.2%}"
            )
        return Verdict(Outcome.RUNS)

    def _find_skip_reason(self, config: EngineConfig) -> str | None:
        if self._champion is not None and self.elapsed_seconds > self._max_seconds:
            return "time limit reached"
        for tried_config, trial in self._trials.items():
            is_correct = trial.difference is not None and trial.difference <= self._max_difference
            if is_correct and replace(tried_config, precision=config.precision) == config:
                return f"{tried_config.precision} already gives correct labels"
        return self._explain_skip(config)

    def _time_alternately(self, *entrants: _Entrant[Result]) -> list[_Entrant[Result]]:
        """Time entrants alternately until one is clearly slower or time is up. Return the entrants without failures."""
        running_entrants = list(entrants)
        for entrant in entrants:
            entrant.seconds_per_window.clear()
        with step("timing"):
            for round_count in range(1 + MAX_TIMED_ROUNDS):
                if round_count > MIN_TIMED_ROUNDS and (
                    self.elapsed_seconds > self._max_seconds or _is_decided(running_entrants)
                ):
                    break
                running_entrants = [entrant for entrant in running_entrants if self._time_call(entrant)]
        return running_entrants

    def _time_call(self, entrant: _Entrant[Result]) -> bool:
        """Time one call, and return whether it succeeded."""
        start_time = self._clock()
        try:
            entrant.candidate.call()
        except TRIAL_ERRORS as error:
            log.debug("%s failed while it was being timed", entrant.config, exc_info=True)
            self._record_failure(entrant.config, error)
            return False
        entrant.seconds_per_window.append((self._clock() - start_time) / entrant.candidate.window_count)
        return True

    def _record_verdict(self, entrant: _Entrant[Result], verdict: Verdict) -> None:
        entrant.trial = replace(entrant.trial, verdict=verdict, windows_per_second=entrant.windows_per_second)
        self._record(entrant.trial)

    def _record_failure(self, config: EngineConfig, error: BaseException) -> None:
        if (device_loss := self._find_device_loss(error)) is not None:
            raise device_loss from error
        self._record(Trial(config, Verdict(Outcome.FAILED, get_first_line(error))))

    def _record(self, trial: Trial) -> None:
        self._trials[trial.choice] = trial
        if trial.verdict.outcome is not Outcome.RUNS:
            log.debug("%s: %s", trial.choice, trial.verdict)


def _is_decided(entrants: Sequence[_Entrant[Any]]) -> bool:
    """Return whether every call to the last entrant took longer than every call to the first one."""
    return (
        min(entrants[-1].seconds_per_window[1:]) > max(entrants[0].seconds_per_window[1:])
        if len(entrants) > 1
        else False
    )
