"""Which bytes of a file decided what was made of it, and what was made of earlier files with the same ones.

Parsing looks at nothing of a file but its size and what it reads of it. So who parses notes what it reads, and
`Precedents` keep these bytes beside the answer, for files that differ in pixels alone.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar, cast

T = TypeVar("T")
Range = tuple[int, int]
Ranges = Sequence[Range]

# Beyond, comparing takes as long as parsing.
MOST_RANGES, MOST_BYTES = 512, 2**16
# So many notes are put in order at once.
_NOTES = 4096
# Files of one size for which different things were understood.
_ALIKE = 4


class Evidence:
    """Collects the ranges of bytes that are read of a file, until they are too many to be of use."""

    def __init__(self) -> None:
        self._notes: list[Range] | None = []

    def watch(self, stream: BinaryIO) -> BinaryIO:
        """The same stream for reading and moving about; what else is asked of it ends the collection, being unknown."""
        return cast("BinaryIO", _Watched(stream, self))

    @property
    def ranges(self) -> tuple[Range, ...] | None:
        """[begin, end) in bytes, in order and apart from each other; None where that is unknown or too much."""
        if self._notes is not None:
            self._notes = _merged(self._notes)
            if not _within_limits(self._notes):
                self.give_up()
        return None if self._notes is None else tuple(self._notes)

    def note(self, begin: int, end: int) -> None:
        """These bytes were read. What was asked for beyond the end of the file follows from its size."""
        if self._notes is None or begin == end:
            return
        self._notes.append((begin, end))
        if len(self._notes) >= _NOTES:
            _ = self.ranges

    def give_up(self) -> None:
        self._notes = None


class _Watched:
    """What a TIFF reader asks of a stream, noted. The way of its calls is that of `io.BufferedReader`."""

    mode = "rb"

    def __init__(self, stream: BinaryIO, evidence: Evidence) -> None:
        self._stream, self._evidence = stream, evidence
        self._position = stream.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._note(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        self._note(count)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = self._stream.seek(offset, whence)
        return self._position

    def tell(self) -> int:
        return self._stream.tell()

    def _note(self, count: int) -> None:
        self._evidence.note(self._position, self._position + count)
        self._position += count

    def __getattr__(self, name: str) -> Any:
        self._evidence.give_up()
        return getattr(self._stream, name)


def _merged(ranges: Ranges) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _within_limits(ranges: Ranges) -> bool:
    return len(ranges) <= MOST_RANGES and sum(end - begin for begin, end in ranges) <= MOST_BYTES


class Content(Protocol):
    """A whole file, mapped or in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class _Precedent(NamedTuple, Generic[T]):
    evidence: tuple[tuple[slice, bytes], ...]
    told: T

    def applies_to(self, content: Content) -> bool:
        """Whether the file has the same bytes where they decide."""
        return all(content[part] == piece for part, piece in self.evidence)

    @property
    def nbytes(self) -> int:
        return sum(len(piece) for _, piece in self.evidence)


class Precedents(Generic[T]):
    """What was understood of earlier files, for files with the same evidence. Safe to use from threads.

    Holds at most `limit_bytes` of evidence, on files of at most so many kinds, told by their size and by what was
    asked; those of no use for the longest time go.
    """

    def __init__(self, kinds: int = 64, limit_bytes: int = 2**21) -> None:
        self._most, self._limit = kinds, limit_bytes
        self._known: OrderedDict[Hashable, list[_Precedent[T]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def answer(self, question: Hashable, content: Content | None, find_out: Callable[[], tuple[T, Ranges | None]]) -> T:
        """What is known, or is found out: what to tell, and the evidence for it, None where it may not be remembered.

        Without a `content` nothing is. Errors are not remembered.
        """
        known = None if content is None else self.find(question, content)
        if known is not None:
            return known
        told, ranges = find_out()
        if content is not None and ranges is not None:
            self.keep(question, content, ranges, told)
        return told

    def find(self, question: Hashable, content: Content) -> T | None:
        """What was told to the same question about a file of this size that is equal in all that decided."""
        key = question, len(content)
        with self._lock:
            known = tuple(self._known.get(key, ()))
        for precedent in known:
            if precedent.applies_to(content):
                with self._lock:
                    if key in self._known:
                        self._known.move_to_end(key)
                return precedent.told
        return None

    def keep(self, question: Hashable, content: Content, ranges: Ranges, told: T) -> None:
        """Remember what was told about a file whose bytes in `ranges` decided; not where these are too many."""
        # Nobody understands a file without its header. Who says so is not to be believed.
        if not ranges or ranges[0][0] != 0 or not _within_limits(ranges):
            return
        key, parts = (question, len(content)), [slice(begin, end) for begin, end in ranges]
        precedent = _Precedent(tuple((part, content[part]) for part in parts), told)
        with self._lock:
            known = self._known.setdefault(key, [])
            known.insert(0, precedent)
            self._bytes += precedent.nbytes
            self._bytes -= sum(old.nbytes for old in known[_ALIKE:])
            del known[_ALIKE:]
            self._known.move_to_end(key)
            while len(self._known) > self._most or self._bytes > self._limit:
                _, forgotten = self._known.popitem(last=False)
                self._bytes -= sum(old.nbytes for old in forgotten)
