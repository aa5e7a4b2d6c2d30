"""Accounting of the disk space that requests hold: uploads, decoded pixels, and results until they are taken."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Self

from service.core.errors import OutOfStorage, RateLimited, TooLarge

RETRY_SECONDS = 5


class ScratchSpace:
    """Bytes on disk that several clients share, `limit` at most. Safe to use from threads.

    No client holds more than it leaves free for others (dynamic thresholds, Choudhury and Hahne 1998): a client alone
    holds half of the space at most, and whoever comes next finds room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that all clients hold."""
        return self._used.total()

    @property
    def most(self) -> int:
        """Bytes that a client holds at most, which is alone with the space."""
        return self.limit // 2

    def hold(self, client: str) -> Hold:
        """Return an empty hold of this client, to be closed once the files are gone."""
        return Hold(self, client)

    def change(self, hold: Hold, nbytes: int, *, checked: bool = False) -> None:
        """Add to a hold that is not closed. Raises what `Hold.reserve` raises where it is `checked`."""
        with self._lock:
            if checked and not hold.closed:
                self._check(hold.client, nbytes)
            if not hold.closed:
                hold.nbytes += nbytes
                self._count(hold.client, nbytes)

    def release(self, hold: Hold) -> None:
        """Close a hold."""
        with self._lock:
            self._count(hold.client, -hold.nbytes)
            hold.nbytes, hold.closed = 0, True

    def _count(self, client: str, nbytes: int) -> None:
        self._used[client] += nbytes
        if not self._used[client]:
            del self._used[client]

    def _check(self, client: str, nbytes: int) -> None:
        free, held = self.limit - self._used.total() - nbytes, self._used[client]
        if held + nbytes <= free:
            return
        if 2 * nbytes > self.limit:
            raise TooLarge(
                f"The request needs {nbytes:,} bytes on the service's disk, of {self.limit:,} that no caller may have"
                " more than half of. Select a channel or a time point, crop the stack, or reduce it."
            )
        if held:
            raise RateLimited(
                f"Your other requests hold {held:,} bytes on the service's disk, and with {nbytes:,} more too little"
                " would be left for others. Take their results, or wait for one to end.",
                RETRY_SECONDS,
            )
        raise OutOfStorage("The requests of others hold too much of the service's disk; try again later, or send less.")


class Hold:
    """Bytes that one request of a client holds, until it is closed; then nothing counts any more."""

    def __init__(self, space: ScratchSpace, client: str) -> None:
        self._space, self.client = space, client
        self.nbytes, self.closed = 0, False

    def reserve(self, nbytes: int) -> None:
        """Take room for a file before it is written.

        Raises TooLarge for more than any client may hold, RateLimited where the client holds too much already, and
        OutOfStorage where all clients together do.
        """
        self._space.change(self, nbytes, checked=True)

    def add(self, nbytes: int) -> None:
        """Count a file that is there already; a negative number for one that is gone."""
        self._space.change(self, nbytes)

    def close(self) -> None:
        """Give everything back."""
        self._space.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
