"""Cache of parsed files, for files that differ only in pixels.

The result of parsing depends only on a file's size and on the bytes that the parser reads. `ReadLog` records those
bytes, and `ParseCache` keeps them beside the result.
"""

from __future__ import annotations

import operator
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, BinaryIO, Generic, NamedTuple, Protocol, TypeVar, cast

T = TypeVar("T")

# Beyond these limits comparing takes as long as parsing.
MOST_PARTS, MOST_BYTES = 512, 2**16
# Number of recorded reads that are merged at once.
_MERGE_AFTER = 4096
# Cached results for one question and file size.
_RESULTS_PER_KEY = 4
# OME-XML gives every file a UUID of its own; only which UUIDs are equal matters.
_UUID = re.compile(rb'((?:UUID="|>)urn:uuid:)([0-9A-Fa-f-]{36})(?=["<])')


class Part(NamedTuple):
    """Bytes [begin, end) of a file, compared after `renumber_uuids` where they are `text`."""

    begin: int
    end: int
    text: bool = False


def renumber_uuids(text: bytes | bytearray) -> bytes:
    """Replace the UUIDs of OME-XML by numbers of the same length, in order of first occurrence."""
    numbers: dict[bytes, int] = {}
    return _UUID.sub(lambda match: match[1] + b"%036d" % numbers.setdefault(match[2], len(numbers)), text)


class ReadLog:
    """Record of the parts of a file that are read, until they are too many to be of use."""

    def __init__(self) -> None:
        # [begin, end) of every read, in plain tuples for speed: a stack of 64 pages takes hundreds of them.
        self._reads: list[tuple[int, int]] | None = []
        self._texts: set[Part] = set()
        self.parsing = True

    def watch(self, stream: BinaryIO) -> BinaryIO:
        """Wrap a stream so that reads are recorded; calls other than read, readinto, seek and tell end the record.

        UUIDs are renumbered in every read, so that the result of parsing cannot depend on them.
        """
        return cast("BinaryIO", _WatchedStream(stream, self))

    @property
    def parts(self) -> tuple[Part, ...] | None:
        """Plain parts in order and disjoint, then texts as they were read; None where unknown or too many."""
        self._merge()
        if self._reads is None:
            return None
        return (*(Part(begin, end) for begin, end in self._reads), *sorted(self._texts))

    def add(self, begin: int, end: int) -> None:
        """Record a read. Reads beyond the end of the file need no record, as they follow from its size."""
        if self._reads is None:
            return
        self._reads.append((begin, end))
        if len(self._reads) >= _MERGE_AFTER:
            self._merge()

    def add_text(self, begin: int, end: int) -> None:
        """Record a read whose UUIDs were renumbered."""
        self._texts.add(Part(begin, end, text=True))
        if len(self._texts) > MOST_PARTS:
            self.give_up()

    def _merge(self) -> None:
        if self._reads is None:
            return
        self._reads = _merged(self._reads)
        if not _within_limits((*self._reads, *(part[:2] for part in self._texts))):
            self.give_up()

    def give_up(self) -> None:
        """End the record: the parts are unknown."""
        self._reads = None
        self._texts.clear()

    def end(self) -> None:
        """End the record where pixels are read from now on, which are not renumbered."""
        self.give_up()
        self.parsing = False


class _WatchedStream:
    """Stream with the calls of `io.BufferedReader`, whose reads are recorded."""

    __slots__ = ("_position", "_read_log", "_stream")

    mode = "rb"

    def __init__(self, stream: BinaryIO, read_log: ReadLog) -> None:
        self._stream, self._read_log = stream, read_log
        self._position = stream.tell()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        begin = self._position
        self._position = end = begin + len(data)
        if b"urn:uuid:" in data and self._read_log.parsing and len(data) <= MOST_BYTES:
            self._read_log.add_text(begin, end)
            return renumber_uuids(data)
        self._read_log.add(begin, end)
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        begin = self._position
        self._position = end = begin + count
        self._read_log.add(begin, end)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = self._stream.seek(offset, whence)
        return self._position

    def tell(self) -> int:
        return self._stream.tell()

    def __getattr__(self, name: str) -> Any:
        self._read_log.give_up()
        return getattr(self._stream, name)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    last = 0
    for begin, end in sorted(ranges):
        if begin == end:
            continue
        if merged and begin <= last:
            if end > last:
                merged[-1] = merged[-1][0], end
                last = end
        else:
            merged.append((begin, end))
            last = end
    return merged


def _within_limits(ranges: Sequence[tuple[int, int]]) -> bool:
    return len(ranges) <= MOST_PARTS and sum(end - begin for begin, end in ranges) <= MOST_BYTES


class Content(Protocol):
    """A whole file, mapped or in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | bytearray: ...


class _Entry(NamedTuple, Generic[T]):
    """Result of one parsed file, and the bytes that decided it, with their positions."""

    places: tuple[slice, ...]
    pieces: tuple[bytes, ...]
    texts: tuple[tuple[slice, bytes], ...]
    result: T

    @classmethod
    def of(cls, content: Content, parts: Sequence[Part], result: T) -> _Entry[T]:
        plain = [slice(part.begin, part.end) for part in parts if not part.text]
        texts = [slice(part.begin, part.end) for part in parts if part.text]
        return cls(
            tuple(plain),
            tuple(bytes(content[place]) for place in plain),
            tuple((place, renumber_uuids(content[place])) for place in texts),
            result,
        )

    def applies_to(self, content: Content) -> bool:
        """Whether the file has equal bytes at the same positions, but for its UUIDs."""
        # `map` in C, as a Python loop over dozens of short pieces takes longer.
        return all(map(operator.eq, map(content.__getitem__, self.places), self.pieces)) and all(
            renumber_uuids(content[place]) == piece for place, piece in self.texts
        )

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pieces)) + sum(len(piece) for _, piece in self.texts)


class ParseCache(Generic[T]):
    """Results of parsing, for files with equal bytes in all parts that decided; thread-safe.

    Keeps at most `limit_bytes` of such parts, for at most `kinds` pairs of question and file size; the least recently
    used pair is dropped first.
    """

    def __init__(self, kinds: int = 64, limit_bytes: int = 2**21) -> None:
        self._max_kinds, self._max_bytes = kinds, limit_bytes
        self._entries: OrderedDict[Hashable, list[_Entry[T]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(
        self,
        question: Hashable,
        content: Content | None,
        parse: Callable[[], tuple[T, Sequence[Part] | None]],
    ) -> T:
        """Return the cached result, or that of `parse`, which also gives the deciding parts, None to cache nothing.

        Without `content` nothing is cached. Errors are not cached.
        """
        cached = None if content is None else self.find(question, content)
        if cached is not None:
            return cached
        result, parts = parse()
        if content is not None and parts is not None:
            self.keep(question, content, parts, result)
        return result

    def find(self, question: Hashable, content: Content) -> T | None:
        """Return the result for the same question and a file equal in size and all deciding parts, or None."""
        key = question, len(content)
        with self._lock:
            entries = tuple(self._entries.get(key, ()))
        for entry in entries:
            if entry.applies_to(content):
                with self._lock:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                return entry.result
        return None

    def keep(self, question: Hashable, content: Content, parts: Sequence[Part], result: T) -> None:
        """Cache a result that `parts` of the file decided, unless they are too many."""
        # Parts without the header cannot be true, and the child that reports them may be compromised.
        if not parts or parts[0].begin != 0 or not _within_limits([part[:2] for part in parts]):
            return
        key, entry = (question, len(content)), _Entry.of(content, parts, result)
        with self._lock:
            entries = self._entries.setdefault(key, [])
            entries.insert(0, entry)
            self._bytes += entry.nbytes
            self._bytes -= sum(old.nbytes for old in entries[_RESULTS_PER_KEY:])
            del entries[_RESULTS_PER_KEY:]
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_kinds or self._bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= sum(old.nbytes for old in dropped)
