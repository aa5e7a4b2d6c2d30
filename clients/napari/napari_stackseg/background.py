"""Work in threads: the border to the thread workers of napari."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from napari.qt.threading import create_worker


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
