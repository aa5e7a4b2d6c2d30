"""Memory accounting and eviction of the loaded models of one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar


class SizedModel(Protocol):
    """A model whose size in device memory is known."""

    @property
    def nbytes(self) -> int:
        """Size in device memory, in bytes."""


T = TypeVar("T", bound=SizedModel)


class ModelUsage(NamedTuple):
    """Memory usage and activity of a loaded model.

    active_request_count  number of requests that are using the model
    last_used             when a request last started or stopped using the model, in seconds since 1970
    """

    nbytes: int
    active_request_count: int
    last_used: float


@dataclass
class LoadedModel(Generic[T]):
    """A loaded model with its usage."""

    model: T
    last_used: float
    active_request_count: int = 0
    # Time of the last use on a clock that is never set back, unlike the system clock, to which `last_used` refers.
    last_use_order: float = field(default_factory=time.monotonic)
    # Whether the model has to be evicted. If so, it gets no new requests, which could keep it loaded forever.
    must_evict: bool = False

    @property
    def nbytes(self) -> int:
        """Current size of the model in bytes, which may include buffers that recent requests needed."""
        return self.model.nbytes

    def begin_use(self, request_count: int) -> None:
        self.active_request_count += request_count
        self._record_use()

    def end_use(self) -> None:
        self.active_request_count -= 1
        self._record_use()

    def _record_use(self) -> None:
        self.last_used, self.last_use_order = time.time(), time.monotonic()


class ModelMemory(Generic[T]):
    """The loaded models of a device within a memory limit. Not thread-safe: `ModelCache` calls it with its lock held.

    limit_bytes     memory limit for all loaded models
    estimate_bytes  estimates the memory of a model in bytes; used until the model has been loaded once
    entries         the loaded models that serve requests, by name
    """

    def __init__(self, limit_bytes: int, estimate_bytes: Callable[[str], int]) -> None:
        self.limit_bytes, self._estimate_bytes = limit_bytes, estimate_bytes
        self.entries: dict[str, LoadedModel[T]] = {}
        self._sizes: dict[str, int] = {}
        # Retired models that are still in use, with their names.
        self._retired_entries: list[tuple[str, LoadedModel[T]]] = []

    @property
    def has_retired_models(self) -> bool:
        """Whether retired models are still loaded."""
        return bool(self._retired_entries)

    @property
    def is_evicting(self) -> bool:
        """Whether a model has to be evicted before another one can be loaded."""
        return any(entry.must_evict for entry in self.entries.values())

    def get_usage(self) -> dict[str, ModelUsage]:
        """Return the usage of each loaded model, by name."""
        return {
            name: ModelUsage(entry.nbytes, entry.active_request_count, entry.last_used)
            for name, entry in self.entries.items()
        }

    def mark_evictions_to_load(self, name: str | None) -> None:
        """Mark the models that must be evicted before the model `name` can be loaded; unmark all if it is None."""
        for entry in self.entries.values():
            entry.must_evict = False
        if name is None:
            # Counting the bytes of all models takes a millisecond, so it is avoided for requests for loaded models.
            return
        excess_bytes = self._count_used_bytes() + self._get_size(name) - self.limit_bytes
        # Evict unused models first. Within each group, evict the least recently used models first.
        for entry in sorted(
            self.entries.values(), key=lambda other: (other.active_request_count > 0, other.last_use_order)
        ):
            entry.must_evict = excess_bytes > 0
            excess_bytes -= entry.nbytes

    def remove_unused_models(self) -> list[str]:
        """Remove all unused models that are retired or have to be evicted, and return their names."""
        removed_names = [
            name for name, entry in self.entries.items() if entry.must_evict and not entry.active_request_count
        ]
        for name in removed_names:
            del self.entries[name]
        removed_names += [name for name, entry in self._retired_entries if not entry.active_request_count]
        self._retired_entries = [(name, entry) for name, entry in self._retired_entries if entry.active_request_count]
        return removed_names

    def put(self, name: str, model: T, nbytes: int) -> bool:
        """Add a model of size `nbytes`, replacing the previous version; return False if it exceeds the memory limit."""
        self._sizes[name] = nbytes
        if nbytes + self._count_used_bytes() > self.limit_bytes:
            return False
        self.retire(name)
        self.entries[name] = LoadedModel(model, time.time())
        return True

    def retire(self, name: str) -> None:
        """Remove a model from `entries`, so that no new request uses it. Its memory is freed after its last request."""
        if (entry := self.entries.pop(name, None)) is not None:
            self._retired_entries.append((name, entry))

    def forget(self, name: str) -> None:
        """Remove a model from `entries`, and forget its size."""
        self._sizes.pop(name, None)
        self.retire(name)

    def _get_size(self, name: str) -> int:
        """Return the size in bytes that a model had when it was last loaded, or an estimate."""
        return self._sizes.get(name) or self._estimate_bytes(name)

    def _count_used_bytes(self) -> int:
        retired_entries = (entry for _, entry in self._retired_entries)
        return sum(entry.nbytes for entry in (*self.entries.values(), *retired_entries))
