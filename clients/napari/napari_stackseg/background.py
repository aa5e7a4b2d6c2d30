"""Work in threads, and messages for people about its progress and its errors. The border to napari's thread workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from napari.qt.threading import create_worker
from stackseg_client import ProblemError

# What the server calls its parameters, and what they are called in the widget.
_WORDS = {
    r"\bset diameter=none\b": "choose Object diameter: original resolution",
    r"\bset diameter=": "choose another object diameter",
    r"\bdiameter=none\b": "Object diameter: original resolution",
    r"\bdiameter=auto\b": "Object diameter: estimate",
    r"\bmodel=(\w+)": r"the model \1",
    r"\b(threshold|channel|axes|voxel_size|quality|link|time)=": r"\1 ",
}


def start(
    function: Callable[..., Any],
    *arguments: Any,
    done: Callable[[Any], None],
    failed: Callable[[BaseException], None],
    reported: Callable[[Any], None] | None = None,
) -> None:
    """Run a function or a generator in a thread, and call the others in the thread of the user interface.

    done      called with the returned value
    failed    called with the raised error
    reported  called with each value that a generator yields
    """
    connections: dict[str, Any] = {"returned": done, "errored": failed}
    if reported is not None:
        connections["yielded"] = reported
    create_worker(function, *arguments, _connect=connections)


def describe_error(error: BaseException) -> str:
    """Return what is wrong and what to do, for people."""
    if not isinstance(error, ProblemError):
        return str(error) or type(error).__name__
    suggested = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in error.suggested.items())
    return rephrase(error.detail) + (f" Suggested: {suggested}." if suggested else "")


def rephrase(message: str) -> str:
    """Replace parameters of the API in a message by what the widget calls them."""
    for pattern, words in _WORDS.items():
        message = re.sub(pattern, words, message)
    return message


def describe_seconds(seconds: float | None) -> str:
    """Return an estimated time: `about 40 s`, `about 3 min`, or an empty string if it is unknown."""
    if seconds is None:
        return ""
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
