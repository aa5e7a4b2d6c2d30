"""Work in threads: the border to the thread workers of napari."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

from napari.qt.threading import create_worker


class WorkerError(Exception):
    """A RuntimeError in a thread, of which napari does not inform the user interface."""


def start(
    function: Callable[..., Any],
    *arguments: Any,
    done: Callable[[Any], None],
    failed: Callable[[BaseException], None],
    reported: Callable[[Any], None] | None = None,
) -> None:
    """Run a function or a generator in a thread, and call the others in the thread of the user interface.

    done      called with the returned value
    failed    called with the raised error; RuntimeError becomes WorkerError
    reported  called with each value that a generator yields
    """
    connections: dict[str, Any] = {"returned": done, "errored": failed}
    if reported is not None:
        connections["yielded"] = reported
    run = _run_generator if inspect.isgeneratorfunction(function) else _run_function
    create_worker(run, function, arguments, _connect=connections)


def _run_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise WorkerError(str(error)) from error


def _run_generator(
    function: Callable[..., Generator[Any, None, Any]], arguments: tuple[Any, ...]
) -> Generator[Any, None, Any]:
    # napari takes every RuntimeError of a generator for that of a deleted Qt object, and drops it.
    try:
        return (yield from function(*arguments))
    except RuntimeError as error:
        raise WorkerError(str(error)) from error
