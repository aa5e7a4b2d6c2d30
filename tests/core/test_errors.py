"""The tree of errors and its diagram in the module docstring."""

from __future__ import annotations

import re
from collections.abc import Iterator

from service.core import errors
from service.core.errors import NotReady, OutOfMemory, QueueFull, StackSegError

TREE_LINE = re.compile(r"(?P<indent>(?:\|   |    )*)(?:[|`]-- )?(?P<name>[A-Z]\w+)(?: {2,}(?P<meaning>\S.*))?")


def parse_tree() -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, name of the base, meaning) for each line of the diagram."""
    assert errors.__doc__ is not None
    ancestors: list[str] = []
    tree = errors.__doc__.split("\n\n")[1]
    for line in tree.splitlines():
        match = TREE_LINE.fullmatch(line)
        assert match is not None, line
        depth = 0 if not ancestors else len(match["indent"]) // 4 + 1
        ancestors = [*ancestors[:depth], match["name"]]
        yield match["name"], ancestors[depth - 1] if depth else "Exception", match["meaning"]


def descendants(cls: type[StackSegError]) -> list[type[StackSegError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in descendants(child))]


CLASSES = descendants(StackSegError)


def test_tree_in_the_docstring_lists_every_class_with_its_base_and_meaning() -> None:
    assert [(name, base) for name, base, _ in parse_tree()] == [
        (cls.__name__, cls.__bases__[0].__name__) for cls in CLASSES
    ]
    assert [name for name, _, meaning in parse_tree() if not meaning] == ["StackSegError"]


def test_all_classes_are_defined_in_errors_and_documented() -> None:
    for cls in CLASSES:
        assert cls.__module__ == errors.__name__
        assert (cls.__doc__ or "").strip().endswith("."), cls


def test_every_class_has_its_own_slug() -> None:
    assert len({cls.slug for cls in CLASSES}) == len(CLASSES)
    for cls in CLASSES:
        assert "slug" in vars(cls), cls
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cls.slug)


SLUGS = """
bad-file ambiguous-axes bad-parameter doubtful-result unsupported-media too-large unknown-model unauthorized
misdirected cross-site rate-limited queue-full not-ready device-lost timed-out out-of-storage storage-unavailable
out-of-memory broken-model non-finite-scores unsupported-package missing-keys internal-error unknown-job
unknown-stack unknown-annotation unknown-training unknown-project switched-off interrupted reader-killed
result-gone model-kept not-finished too-slow output-exists configuration cancelled
"""


def test_slugs_are_stable() -> None:
    branches = {StackSegError, *StackSegError.__subclasses__()}
    assert {cls.slug for cls in CLASSES if cls not in branches or not cls.__subclasses__()} == set(SLUGS.split())


def test_errors_have_the_attributes_that_responses_need() -> None:
    full = QueueFull("Sixteen requests are waiting.", retry_after=7)
    assert (str(full), full.retry_after) == ("Sixteen requests are waiting.", 7)
    assert NotReady("Warming up.").retry_after > 0
    assert OutOfMemory("The volume needs 9 GiB.", needed_bytes=9 * 2**30).needed_bytes == 9 * 2**30
