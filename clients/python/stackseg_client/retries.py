"""Repetition of requests that a busy or unreachable server did not answer."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace

from stackseg_client.errors import ConnectionFailed, ProblemError, StackSegError

LOGGER = logging.getLogger("stackseg_client")

# Delay before the first retry if the server does not specify one. It doubles with each retry, up to the maximum.
FIRST_DELAY_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 10.0
# Minimum number of retries of folders and followed jobs, which wait for a busy server, and for a restart of the server.
PATIENT_RETRIES = 50
# Longest time that a server may ask folders and followed jobs to wait. Servers ask for up to an hour.
MAX_PATIENT_SECONDS = 3600.0


@dataclass(frozen=True)
class Retries:
    """How often a request is repeated if the server is busy or cannot be reached.

    count        maximum number of retries
    max_seconds  maximum time between two attempts; if the server asks for more, its error is raised
    """

    count: int = 3
    max_seconds: float = 60.0

    def get_delay(self, error: StackSegError, attempt: int, *, is_repeatable: bool) -> float | None:
        """Return the seconds until the next attempt; None if the error is final. The first attempt is 0.

        Logs delays of over a second.
        """
        backoff = min(FIRST_DELAY_SECONDS * 2**attempt, MAX_BACKOFF_SECONDS) * random.uniform(1, 1.5)  # noqa: S311
        delay = _choose_delay(error, min(backoff, self.max_seconds), is_repeatable=is_repeatable)
        if delay is None or attempt >= self.count or delay > self.max_seconds:
            return None
        if delay > 1:
            LOGGER.warning("%s Trying again in %.0f s.", error, delay)
        return delay

    def make_patient(self) -> Retries:
        """Return the settings for work that takes long: more retries, after all the time that a server asks for."""
        if not self.count:
            return self
        return replace(
            self, count=max(self.count, PATIENT_RETRIES), max_seconds=max(self.max_seconds, MAX_PATIENT_SECONDS)
        )


def _choose_delay(error: StackSegError, backoff: float, *, is_repeatable: bool) -> float | None:
    """Return the seconds that the server asks for, at least `backoff`; None if the request must not be repeated."""
    if isinstance(error, ConnectionFailed):
        return backoff if is_repeatable or not error.is_sent else None
    if not isinstance(error, ProblemError):
        return None
    if error.status in {429, 503} and error.retry_after is not None:
        return max(error.retry_after, backoff)
    # A proxy that does not reach the server.
    is_temporary = error.type == "about:blank" and error.status in {502, 503, 504}
    return backoff if is_temporary and is_repeatable else None
