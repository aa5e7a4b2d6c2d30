"""Files beside the labels of a folder of stacks: records by which it resumes, one table, one report."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter

from service.core.errors import BadParameter
from service.serving.storage.result_folder import ResultFolder

RECORDS, TABLE, REPORT = "stacks.jsonl", "objects.csv", "report.html"

_STYLE = """
body { font: 15px sans-serif; margin: 2em }
td, th { padding: .4em 1em .4em 0; text-align: left; vertical-align: top }
img { max-width: 256px; max-height: 256px }
small { color: #666; display: block; max-width: 50em }
.failed { color: #b00 }
"""


# A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@")


class StackRecord(NamedTuple):
    """The outcome of one stack.

    key          of the parameters, the model and the software
    size, mtime  of the file in bytes and nanoseconds
    result       label file, relative to the folder of the results; "" where there is none
    problem      why there is no result, or one of a series that ends early; "" where nothing failed
    doubtful     whether the model is not sure of the result; the first of the notes then says why
    """

    key: str
    size: int
    mtime: int
    result: str = ""
    objects: int | None = None
    seconds: float = 0.0
    notes: Sequence[str] = ()
    problem: str = ""
    doubtful: bool = False


# pydantic's errors are ValueErrors.
_STRICT = ConfigDict(strict=True)
_NAME = TypeAdapter(str, config=_STRICT)
_RECORD = TypeAdapter(StackRecord, config=_STRICT)
_SERIES = TypeAdapter(tuple[str, str, str])


class Records(dict[str, StackRecord]):
    """The latest record of each stack by its name, each kept as a line of JSON as soon as it is there.

    A last line that an end of the process has cut short counts as absent. Raises BadParameter for other damage.
    """

    def __init__(self, out: ResultFolder) -> None:
        super().__init__()
        self._out = out
        self._series: dict[str, tuple[str, str]] = {}
        try:
            with out.open(RECORDS) as file:
                lines = file.read().split("\n")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise _damaged() from error
        try:
            for line in lines[:-1]:
                self._read(json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise _damaged() from error
        if lines[-1]:
            _write(out, RECORDS, "".join(f"{line}\n" for line in lines[:-1]))

    def _read(self, content: dict[str, Any]) -> None:
        if "series" in content:
            parameters, *width = _SERIES.validate_python([content[key] for key in ("series", "diameter", "note")])
            self._series[parameters] = (width[0], width[1])
        else:
            name = _NAME.validate_python(content.pop("stack"))
            self[name] = _RECORD.validate_python(content)

    def add(self, name: str, record: StackRecord) -> None:
        """Record how a stack went."""
        self[name] = record
        self._append({"stack": name, **record._asdict()})

    def is_done(self, name: str, key: str, status: os.stat_result) -> bool:
        """Return whether there is a result of this very file with these parameters."""
        record = self.get(name)
        if record is None or record.problem or not self._has(record.result):
            return False
        return (record.key, record.size, record.mtime) == (key, status.st_size, status.st_mtime_ns)

    def _has(self, result: str) -> bool:
        """Return whether there is a file, or a folder of Zarr, at the place of a result."""
        return self._out.has(result) or (bool(result) and self._out.has(f"{result}/zarr.json"))

    def series(self, parameters: str) -> tuple[str, str] | None:
        """Return the width that holds for all stacks with these parameters, and the note about it, if on record."""
        return self._series.get(parameters)

    def set_series(self, parameters: str, width: tuple[str, str]) -> None:
        """Record the width that holds for all stacks with these parameters, and the note about it."""
        self._series[parameters] = width
        self._append({"series": parameters, "diameter": width[0], "note": width[1]})

    def _append(self, content: dict[str, Any]) -> None:
        self._out.append(RECORDS, json.dumps(content))


def printable(name: str) -> str:
    """Return the name of a file as text that every encoding of Unicode takes."""
    return name.encode(errors="backslashreplace").decode()


def _as_cell(name: str) -> str:
    """Return the name of a file as text in one line, and as a path where a spreadsheet would compute it."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in printable(name))
    return f"./{text}" if text.startswith(_FORMULA) else text


def write_table(out: ResultFolder, stacks: Iterable[tuple[str, str]]) -> None:
    """Write one table of the objects of all stacks (name, place), with a first column that names the stack.

    Stacks of other channels have other columns; a cell that a stack does not have is empty.
    """
    tables = [(name, path) for name, place in stacks if out.has(path := f"{place}_objects.csv")]
    columns = {"stack": None}
    for _, path in tables:
        with out.open(path) as table:
            columns |= dict.fromkeys(next(csv.reader(table), []))
    with (out.staging / TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for name, path in tables:
            with out.open(path) as table:
                writer.writerows({"stack": _as_cell(name), **row} for row in csv.DictReader(table))
    out.put(TABLE, TABLE)


def write_report(out: ResultFolder, model: str, stacks: Sequence[tuple[str, str, StackRecord | None]]) -> None:
    """Write a page with a row for each stack (name, place, record): picture, objects, seconds, and what to know."""
    rows = "\n".join(_row(printable(name), place, record) for name, place, record in stacks)
    heads = "".join(f"<th>{head}</th>" for head in ("", "stack", "objects", "seconds", "notes"))
    done = sum(record is not None and not record.problem for _, _, record in stacks)
    page = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>StackSeg</title><style>{_STYLE}</style>\n'
        f"<h1>{done} of {len(stacks)} stacks, {escape(model)}</h1>\n<table><tr>{heads}</tr>\n{rows}\n</table></html>\n"
    )
    _write(out, REPORT, page)


def _write(out: ResultFolder, name: str, text: str) -> None:
    (out.staging / name).write_text(text, encoding="utf-8")
    out.put(name, name)


def _damaged() -> BadParameter:
    return BadParameter(
        f"{RECORDS} among the results is damaged, or of another version; delete it to segment all stacks anew."
    )


def _row(name: str, place: str, record: StackRecord | None) -> str:
    if record is None:
        return f"<tr><td></td><td>{escape(name)}</td><td></td><td></td><td>not begun</td></tr>"
    notes = f'<span class="failed">{escape(record.problem)}</span>' if record.problem else ""
    if not record.result:
        return f"<tr><td></td><td>{escape(name)}</td><td></td><td></td><td>{notes}</td></tr>"
    picture = f'<img src="{quote(os.fsencode(place))}.png" alt="">'
    link = f'<a href="{quote(os.fsencode(record.result))}">{escape(name)}</a>'
    classes = [' class="failed"' if record.doubtful and not index else "" for index in range(len(record.notes))]
    notes += "".join(
        f"<small{class_}>{escape(note)}</small>" for class_, note in zip(classes, record.notes, strict=True)
    )
    objects = "" if record.objects is None else record.objects
    return f"<tr><td>{picture}</td><td>{link}</td><td>{objects}</td><td>{record.seconds:.1f}</td><td>{notes}</td></tr>"
