"""Memory accounting and eviction of the loaded models of one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Loadable(Protocol):
    """An object with a known memory size."""

    @property
    def nbytes(self) -> int:
        """Size in the memory of the device, in bytes."""


T = TypeVar("T", bound=Loadable)


class LoadedModel(NamedTuple):
    """Memory and use of a loaded model.

    users  number of requests that use the model
    used   when a request last began or ended to use the model, in seconds since 1970
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
    # Whether the model has to be evicted. It gets no new users, because they could keep it loaded forever.
    must_evict: bool = False

    @property
    def nbytes(self) -> int:
        """Current size of the model in bytes, which may include buffers that recent requests needed."""
        return self.model.nbytes

    def begin_use(self, users: int) -> None:
        self.users += users
        self.used = time.time()

    def end_use(self) -> None:
        self.users -= 1
        self.used = time.time()


class ModelMemory(Generic[T]):
    """The loaded models of a device within a memory limit. Not thread-safe: `ModelCache` calls it with its lock held.

    limit_bytes  memory limit for all loaded models
    guess        estimates the memory of a model in bytes; used until the model has been loaded once
    entries      the loaded models that serve requests, by name
    """

    def __init__(self, limit_bytes: int, guess: Callable[[str], int]) -> None:
        self.limit_bytes, self._guess = limit_bytes, guess
        self.entries: dict[str, Entry[T]] = {}
        self._sizes: dict[str, int] = {}
        # Replaced entries that are still in use, with the names of their models.
        self._replaced: list[tuple[str, Entry[T]]] = []

    @property
    def has_replaced(self) -> bool:
        """Whether replaced models are still loaded."""
        return bool(self._replaced)

    @property
    def is_making_room(self) -> bool:
        """Whether a model has to be evicted before another one can be loaded."""
        return any(entry.must_evict for entry in self.entries.values())

    def measure(self) -> dict[str, LoadedModel]:
        """Return the memory and use of each loaded model, by name."""
        return {name: LoadedModel(entry.nbytes, entry.users, entry.used) for name, entry in self.entries.items()}

    def make_room(self, name: str | None) -> None:
        """Mark the models that have to be evicted to load the model `name`; None: unmark all models."""
        excess = 0 if name is None else self._used_bytes() + self._size_of(name) - self.limit_bytes
        # Evict unused models first, and the least recently used models first among these.
        for entry in sorted(self.entries.values(), key=lambda other: (other.users > 0, other.used)):
            entry.must_evict = excess > 0
            excess -= entry.nbytes

    def drop_unused(self) -> list[str]:
        """Remove all unused models that have to be evicted or were replaced, and return their names."""
        dropped = [name for name, entry in self.entries.items() if entry.must_evict and not entry.users]
        for name in dropped:
            del self.entries[name]
        dropped += [name for name, entry in self._replaced if not entry.users]
        self._replaced = [(name, entry) for name, entry in self._replaced if entry.users]
        return dropped

    def put(self, name: str, model: T, nbytes: int) -> bool:
        """Add a model of size `nbytes`, replacing the previous version; return False if it exceeds the memory limit."""
        self._sizes[name] = nbytes
        if nbytes + self._used_bytes() > self.limit_bytes:
            return False
        self.replace(name)
        self.entries[name] = Entry(model, time.time())
        return True

    def replace(self, name: str) -> None:
        """Remove a model from `entries`, so that no new request uses it. It is dropped when its last use ends."""
        if (entry := self.entries.pop(name, None)) is not None:
            self._replaced.append((name, entry))

    def forget(self, name: str) -> None:
        """Remove a model from `entries`, and forget its size."""
        self._sizes.pop(name, None)
        self.replace(name)

    def _size_of(self, name: str) -> int:
        """Return the size of a model when it was last loaded, or else an estimate, in bytes."""
        return self._sizes.get(name) or self._guess(name)

    def _used_bytes(self) -> int:
        replaced = (entry for _, entry in self._replaced)
        return sum(entry.nbytes for entry in (*self.entries.values(), *replaced))
