"""A child process of the reader in which a marked file takes over the process that reads it.

That process then describes all later files as stacks of the shape `WRONG_SHAPE`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from service.core.types import Description
from service.formats import stack_reader
from service.formats.sandbox import child_main

MARKER = b"take over this process"
WRONG_SHAPE = (1, 1, 4, 4)
_inspect = stack_reader.inspect


def inspect(file: int, *arguments: Any) -> Description:
    """Describe a file, and replace this function if the file is marked."""
    is_marked = os.pread(file, len(MARKER), os.fstat(file).st_size - len(MARKER)) == MARKER
    if is_marked:
        stack_reader.inspect = inspect_wrongly  # type: ignore[assignment]
    return _inspect(file, *arguments)


def inspect_wrongly(file: int, *arguments: Any) -> Description:
    """Describe a file with a wrong shape."""
    return replace(_inspect(file, *arguments), stored_shape=WRONG_SHAPE)


if __name__ == "__main__":
    stack_reader.inspect = inspect  # type: ignore[assignment]
    child_main.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
