"""Which bytes of a file decided what was made of it, and what was made of earlier files with the same ones.

Parsing looks at nothing of a file but its size and what it reads of it. So who parses notes what it reads, and
`ParseCache` keep these bytes beside the answer, for files that differ in pixels alone.
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

# Beyond, comparing takes as long as parsing.
MOST_PARTS, MOST_BYTES = 512, 2**16
# So many notes are put in order at once.
_NOTES = 4096
# Files of one size for which different things were understood.
_ALIKE = 4
# OME-XML gives every file an identifier of its own, of which nothing matters but which others are the same.
_IDENTIFIER = re.compile(rb'((?:UUID="|>)urn:uuid:)([0-9A-Fa-f-]{36})(?=["<])')


class Part(NamedTuple):
    """Bytes [begin, end) of a file; those of a `text` count as `renumbered` leaves them."""

    begin: int
    end: int
    text: bool = False


def renumbered(text: bytes | bytearray) -> bytes:
    """With numbers for the UUIDs of OME-XML, in the order in which they first come; of the same length."""
    numbers: dict[bytes, int] = {}
    return _IDENTIFIER.sub(lambda found: found[1] + b"%036d" % numbers.setdefault(found[2], len(numbers)), text)


class ReadLog:
    """Collects the parts that are read of a file, until they are too many to be of use."""

    def __init__(self) -> None:
        # [begin, end) of every read, in plain tuples: a stack of 64 pages takes hundreds of them.
        self._notes: list[tuple[int, int]] | None = []
        self._texts: set[Part] = set()
        self.parsing = True

    def watch(self, stream: BinaryIO) -> BinaryIO:
        """The same stream for reading and moving about; what else is asked of it ends the collection, being unknown.

        UUIDs come out `renumbered`, read by read, so that what is made of the file cannot depend on them.
        """
        return cast("BinaryIO", _Watched(stream, self))

    @property
    def parts(self) -> tuple[Part, ...] | None:
        """Plain ones in order and apart from each other, then texts as they were read; None: unknown, or too much."""
        self._put_in_order()
        if self._notes is None:
            return None
        return (*(Part(begin, end) for begin, end in self._notes), *sorted(self._texts))

    def note(self, begin: int, end: int) -> None:
        """This was read. What was asked for beyond the end of the file follows from its size."""
        if self._notes is None:
            return
        self._notes.append((begin, end))
        if len(self._notes) >= _NOTES:
            self._put_in_order()

    def note_text(self, begin: int, end: int) -> None:
        """The same, `renumbered`."""
        self._texts.add(Part(begin, end, text=True))
        if len(self._texts) > MOST_PARTS:
            self.give_up()

    def _put_in_order(self) -> None:
        if self._notes is None:
            return
        self._notes = _merged(self._notes)
        if not _within_limits((*self._notes, *(part[:2] for part in self._texts))):
            self.give_up()

    def give_up(self) -> None:
        self._notes = None
        self._texts.clear()

    def end(self) -> None:
        """What is read from now on are pixels, which come out as they are."""
        self.give_up()
        self.parsing = False


class _Watched:
    """What a TIFF reader asks of a stream, noted. The way of its calls is that of `io.BufferedReader`."""

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
            self._read_log.note_text(begin, end)
            return renumbered(data)
        self._read_log.note(begin, end)
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        begin = self._position
        self._position = end = begin + count
        self._read_log.note(begin, end)
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


class _Precedent(NamedTuple, Generic[T]):
    """What was told, and the bytes that decided, each with their place."""

    places: tuple[slice, ...]
    pieces: tuple[bytes, ...]
    texts: tuple[tuple[slice, bytes], ...]
    told: T

    @classmethod
    def of(cls, content: Content, parts: Sequence[Part], told: T) -> _Precedent[T]:
        plain = [slice(part.begin, part.end) for part in parts if not part.text]
        texts = [slice(part.begin, part.end) for part in parts if part.text]
        return cls(
            tuple(plain),
            tuple(bytes(content[place]) for place in plain),
            tuple((place, renumbered(content[place])) for place in texts),
            told,
        )

    def applies_to(self, content: Content) -> bool:
        """Whether the file has the same bytes there, but for its UUIDs."""
        # Some dozens of pieces of a few bytes each, which a loop in Python would take longer to go through.
        return all(map(operator.eq, map(content.__getitem__, self.places), self.pieces)) and all(
            renumbered(content[place]) == piece for place, piece in self.texts
        )

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pieces)) + sum(len(piece) for _, piece in self.texts)


class ParseCache(Generic[T]):
    """What was understood of earlier files, for files with the same evidence. Safe to use from threads.

    Holds at most `limit_bytes` of evidence, on files of at most so many kinds, told by their size and by what was
    asked; those of no use for the longest time go.
    """

    def __init__(self, kinds: int = 64, limit_bytes: int = 2**21) -> None:
        self._most, self._limit = kinds, limit_bytes
        self._known: OrderedDict[Hashable, list[_Precedent[T]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def answer(
        self,
        question: Hashable,
        content: Content | None,
        find_out: Callable[[], tuple[T, Sequence[Part] | None]],
    ) -> T:
        """What is known, or is found out: what to tell, and the evidence for it, None where it may not be remembered.

        Without a `content` nothing is. Errors are not remembered.
        """
        known = None if content is None else self.find(question, content)
        if known is not None:
            return known
        told, parts = find_out()
        if content is not None and parts is not None:
            self.keep(question, content, parts, told)
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

    def keep(self, question: Hashable, content: Content, parts: Sequence[Part], told: T) -> None:
        """Remember what was told about a file that `parts` of it decided about; not where these are too many."""
        # Nobody understands a file without its header. Who says so is not to be believed.
        if not parts or parts[0].begin != 0 or not _within_limits([part[:2] for part in parts]):
            return
        key, precedent = (question, len(content)), _Precedent.of(content, parts, told)
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
