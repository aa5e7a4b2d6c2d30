"""The memory that the loaded models of one device take, and which of them make room for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Loadable(Protocol):
    """A model that takes memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory."""


T = TypeVar("T", bound=Loadable)


class LoadedModel(NamedTuple):
    """Memory and use of a loaded model.

    users  how many requests use the model
    used   when the last one began or ended, in seconds since 1970
    """

    nbytes: int
    users: int
    used: float


@dataclass
class Entry(Generic[T]):
    """A loaded model and its use."""

    model: T
    used: float
    users: int = 0
    # Has to make room, and gets no more users: they would keep it loaded for ever.
    leaving: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that the model takes by now: some keep what latest requests have asked for."""
        return self.model.nbytes

    def begin_use(self, users: int) -> None:
        self.users += users
        self.used = time.time()

    def end_use(self) -> None:
        self.users -= 1
        self.used = time.time()


class ModelMemory(Generic[T]):
    """The loaded models by name, within a limit. Not thread-safe: `ModelCache` calls it with its lock.

    limit_bytes  of all loaded models together
    guess        returns the bytes that a model may take, until it has been loaded once
    entries      the loaded models that serve requests, by name
    """

    def __init__(self, limit_bytes: int, guess: Callable[[str], int]) -> None:
        self.limit_bytes, self._guess = limit_bytes, guess
        self.entries: dict[str, Entry[T]] = {}
        self._sizes: dict[str, int] = {}
        # Entries that others have replaced, as long as they are in use, with the names of their models.
        self._replaced: list[tuple[str, Entry[T]]] = []

    @property
    def has_replaced(self) -> bool:
        """Whether models that others have replaced are still loaded."""
        return bool(self._replaced)

    @property
    def is_making_room(self) -> bool:
        """Whether a model has to be unloaded before another one is loaded."""
        return any(entry.leaving for entry in self.entries.values())

    def measure(self) -> dict[str, LoadedModel]:
        """Return memory and use of every loaded model by name."""
        return {name: LoadedModel(entry.nbytes, entry.users, entry.used) for name, entry in self.entries.items()}

    def make_room(self, name: str | None) -> None:
        """Mark the models that have to make room for one that is to be loaded; None: no model is."""
        excess = 0 if name is None else self._used_bytes() + self._size_of(name) - self.limit_bytes
        # Models in use make room last, then the least recently used first.
        for entry in sorted(self.entries.values(), key=lambda other: (other.users > 0, other.used)):
            entry.leaving = excess > 0
            excess -= entry.nbytes

    def drop_unused(self) -> list[str]:
        """Remove the models that have to make room or were replaced, and are not in use; return their names."""
        dropped = [name for name, entry in self.entries.items() if entry.leaving and not entry.users]
        for name in dropped:
            del self.entries[name]
        dropped += [name for name, entry in self._replaced if not entry.users]
        self._replaced = [(name, entry) for name, entry in self._replaced if entry.users]
        return dropped

    def put(self, name: str, model: T, nbytes: int) -> bool:
        """Add a model in place of the earlier one of its name; return False if there is no room for `nbytes` more."""
        self._sizes[name] = nbytes
        if nbytes + self._used_bytes() > self.limit_bytes:
            return False
        self.replace(name)
        self.entries[name] = Entry(model, time.time())
        return True

    def replace(self, name: str) -> None:
        """Let no new request use a model, which is dropped once it is not in use."""
        if (entry := self.entries.pop(name, None)) is not None:
            self._replaced.append((name, entry))

    def forget(self, name: str) -> None:
        """Replace a model, and forget how much memory it took."""
        self._sizes.pop(name, None)
        self.replace(name)

    def _size_of(self, name: str) -> int:
        """Return the bytes that a model took when it was last loaded, else a guess."""
        return self._sizes.get(name) or self._guess(name)

    def _used_bytes(self) -> int:
        replaced = (entry for _, entry in self._replaced)
        return sum(entry.nbytes for entry in (*self.entries.values(), *replaced))
