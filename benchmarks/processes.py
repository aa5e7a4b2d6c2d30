"""A process and its descendants, as Linux accounts for them."""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and those below it that live; nobody for one that is gone."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in files for child in file.read_text(encoding="ascii").split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(one for child in children for one in family(child))]


def cpu_seconds(pid: int) -> float:
    """Used by a process and all below it so far, those that have ended and were waited for included."""
    return sum(_ticks(one) for one in family(pid)) / TICKS


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # utime and stime of its own, then those of children that it has waited for.
    return sum(map(int, fields[11:15]))
