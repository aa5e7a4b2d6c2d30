"""Summary files of a run: a table with the objects of all stacks, and a report with a row for each stack."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from service.serving.jobs.folders.records import StackRecord
    from service.serving.storage.result_folder import ResultFolder

TABLE_FILE = "objects.csv"
REPORT_FILE = "report.html"

_STYLE = """
body { font: 15px sans-serif; margin: 2em }
td, th { padding: .4em 1em .4em 0; text-align: left; vertical-align: top }
img { max-width: 256px; max-height: 256px }
small { color: #666; display: block; max-width: 50em }
.failed { color: #b00 }
"""
# Spreadsheets interpret a cell with one of these prefixes as a formula.
_FORMULA_PREFIXES = ("=", "+", "-", "@")


def to_printable(name: str) -> str:
    """Return a file name as a valid Unicode string. Undecodable bytes become escape sequences."""
    return name.encode(errors="backslashreplace").decode()


def _format_cell(name: str) -> str:
    """Format a file name as a table cell on one line. Add the prefix `./` to names that look like formulas."""
    cell = "".join(character if character.isprintable() else repr(character)[1:-1] for character in to_printable(name))
    return f"./{cell}" if cell.startswith(_FORMULA_PREFIXES) else cell


def write_table(results: ResultFolder, stacks: Iterable[tuple[str, str]]) -> None:
    """Write one table with the objects of all stacks. The first column contains the name of the stack.

    `stacks` yields the name and the result stem of each stack. The columns depend on the channels of a stack. If a
    stack lacks a column, its cells in that column are empty.
    """
    tables = [(name, path) for name, stem in stacks if results.has_file(path := f"{stem}_objects.csv")]
    columns = {"stack": None}
    for _, path in tables:
        with results.open(path) as table:
            columns |= dict.fromkeys(next(csv.reader(table), []))
    with (results.staging / TABLE_FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for name, path in tables:
            with results.open(path) as table:
                writer.writerows({"stack": _format_cell(name), **row} for row in csv.DictReader(table))
    results.put(TABLE_FILE, TABLE_FILE)


def write_report(results: ResultFolder, model: str, stacks: Sequence[tuple[str, str, StackRecord | None]]) -> None:
    """Write an HTML report with a row for each stack: preview, number of objects, processing time and notes.

    `stacks` contains the name, the result stem and the record of each stack.
    """
    rows = "\n".join(_format_row(to_printable(name), stem, record) for name, stem, record in stacks)
    headers = "".join(f"<th>{header}</th>" for header in ("", "stack", "objects", "seconds", "notes"))
    done_count = sum(record is not None and not record.problem for _, _, record in stacks)
    page = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>StackSeg</title><style>{_STYLE}</style>\n'
        f"<h1>{done_count} of {len(stacks)} stacks, {escape(model)}</h1>\n"
        f"<table><tr>{headers}</tr>\n{rows}\n</table></html>\n"
    )
    results.put_text(REPORT_FILE, page)


def _format_row(name: str, stem: str, record: StackRecord | None) -> str:
    if record is None:
        return f"<tr><td></td><td>{escape(name)}</td><td></td><td></td><td>not processed</td></tr>"
    notes = f'<span class="failed">{escape(record.problem)}</span>' if record.problem else ""
    if not record.result:
        return f"<tr><td></td><td>{escape(name)}</td><td></td><td></td><td>{notes}</td></tr>"
    picture = f'<img src="{quote(os.fsencode(stem))}.png" alt="">'
    link = f'<a href="{quote(os.fsencode(record.result))}">{escape(name)}</a>'
    class_attributes = [
        ' class="failed"' if record.doubtful and not index else "" for index in range(len(record.notes))
    ]
    notes += "".join(
        f"<small{attribute}>{escape(note)}</small>"
        for attribute, note in zip(class_attributes, record.notes, strict=True)
    )
    objects = "" if record.objects is None else record.objects
    return f"<tr><td>{picture}</td><td>{link}</td><td>{objects}</td><td>{record.seconds:.1f}</td><td>{notes}</td></tr>"
