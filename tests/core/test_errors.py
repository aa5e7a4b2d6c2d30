"""The error tree: what the docstring draws is what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from service.core import errors
from service.core.errors import NotReady, OutOfMemory, QueueFull, StackSegError

DRAWN = re.compile(r"(?P<indent>(?:\|   |    )*)(?:[|`]-- )?(?P<name>[A-Z]\w+)(?: {2,}(?P<meaning>\S.*))?")


def drawn() -> Iterator[tuple[str, str, str | None]]:
    """(name, name of its base, meaning) for each line of the drawing."""
    assert errors.__doc__ is not None
    above: list[str] = []
    tree = errors.__doc__.split("\n\n")[1]
    for line in tree.splitlines():
        match = DRAWN.fullmatch(line)
        assert match is not None, line
        depth = 0 if not above else len(match["indent"]) // 4 + 1
        above = [*above[:depth], match["name"]]
        yield match["name"], above[depth - 1] if depth else "Exception", match["meaning"]


def descendants(cls: type[StackSegError]) -> list[type[StackSegError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in descendants(child))]


CLASSES = descendants(StackSegError)


def test_drawing_shows_every_class_under_its_base_with_its_meaning() -> None:
    assert [(name, base) for name, base, _ in drawn()] == [(cls.__name__, cls.__bases__[0].__name__) for cls in CLASSES]
    assert [name for name, _, meaning in drawn() if not meaning] == ["StackSegError"]


def test_classes_of_the_tree_live_here_and_say_what_happened() -> None:
    for cls in CLASSES:
        assert cls.__module__ == errors.__name__
        assert (cls.__doc__ or "").strip().endswith("."), cls


def test_slugs_are_distinct_and_belong_to_their_class() -> None:
    assert len({cls.slug for cls in CLASSES}) == len(CLASSES)
    for cls in CLASSES:
        assert "slug" in vars(cls), cls
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.slug)


SLUGS = """
bad-file ambiguous-axes bad-parameter doubtful-result unsupported-media too-large unknown-model unauthorized
misdirected rate-limited queue-full not-ready device-lost timed-out out-of-storage storage-unavailable
out-of-memory broken-model non-finite-scores unsupported-package missing-keys internal-error unknown-job
unknown-stack unknown-annotation unknown-training switched-off interrupted reader-killed result-gone model-kept
not-finished too-slow output-exists configuration cancelled
"""


def test_slugs_are_a_promise_to_clients() -> None:
    branches = {StackSegError, *StackSegError.__subclasses__()}
    assert {cls.slug for cls in CLASSES if cls not in branches or not cls.__subclasses__()} == set(SLUGS.split())


def test_errors_carry_what_the_answer_needs() -> None:
    full = QueueFull("Sixteen requests are waiting.", retry_after=7)
    assert (str(full), full.retry_after) == ("Sixteen requests are waiting.", 7)
    assert NotReady("Warming up.").retry_after > 0
    assert OutOfMemory("The volume needs 9 GiB.", needed_bytes=9 * 2**30).needed_bytes == 9 * 2**30
