"""The stacks of a folder, and the summary files of a run: records for resuming the run, a table and a report."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter

from service.core.errors import BadParameter
from service.formats.zarr.store import METADATA_NAMES
from service.serving.results.metadata import has_stack_suffix, make_answer_name
from service.serving.storage.result_folder import ResultFolder

RECORDS_FILE = "stacks.jsonl"
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

# Files and folders that file managers and file servers create.
_SYSTEM_NAMES = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))
# The beginning of a file, or of a metadata file of an OME-Zarr folder, that is searched for signatures.
_HEAD_BYTES = 2**12
_MAX_METADATA_BYTES = 2**20
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ZIP_SIGNATURE = b"PK\x03\x04"
# At least one of the first names in a zip archive of an OME-Zarr image or of an OIF contains one of these words.
_ARCHIVED_STACK_NAMES = (b".oif", b".zarr/", *(name.encode() for name in METADATA_NAMES))
# The Software tag of a written TIFF, and the description for ImageJ, which images that are not results lack.
_TIFF_RESULT_WORDS = (b"StackSeg\0", b"ImageJ=")
_ZARR_RESULT_WORD = b"stackseg/origin"


class StackRecord(NamedTuple):
    """The outcome of one stack. The field names are stored, so renaming a field would break existing record files.

    key          identifies the parameters, the model and the software version
    size, mtime  size of the input in bytes, and its latest modification time in nanoseconds
    result       path of the label file relative to the results folder; "" if there is none
    objects      number of objects; None if the output has no objects
    seconds      processing time
    notes        warnings and notes for the user
    problem      reason why there is no result, or why a series is incomplete; "" if nothing failed
    doubtful     whether confidence in the result is low; if so, the first note gives the reason
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


# Validation errors of pydantic are ValueErrors.
_STRICT_CONFIG = ConfigDict(strict=True)
_NAME_ADAPTER = TypeAdapter(str, config=_STRICT_CONFIG)
_RECORD_ADAPTER = TypeAdapter(StackRecord, config=_STRICT_CONFIG)
_DIAMETER_ADAPTER = TypeAdapter(tuple[str, str, str])


class RecordFile(dict[str, StackRecord]):
    """The latest record of each stack, by stack name. Each new record is immediately appended to a JSON Lines file.

    An incomplete last line, left by a killed process, is ignored. Raises BadParameter if any other line is damaged.
    """

    def __init__(self, results: ResultFolder) -> None:
        super().__init__()
        self._results = results
        self._diameters: dict[str, tuple[str, str]] = {}
        try:
            with results.open(RECORDS_FILE) as file:
                lines = file.read().split("\n")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise _make_damage_error() from error
        try:
            for line in lines[:-1]:
                self._add_line(json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise _make_damage_error() from error
        if lines[-1]:
            _write_text(results, RECORDS_FILE, "".join(f"{line}\n" for line in lines[:-1]))

    def _add_line(self, content: dict[str, Any]) -> None:
        if "series" in content:
            parameters, *diameter_and_note = _DIAMETER_ADAPTER.validate_python(
                [content[key] for key in ("series", "diameter", "note")]
            )
            self._diameters[parameters] = (diameter_and_note[0], diameter_and_note[1])
        else:
            name = _NAME_ADAPTER.validate_python(content.pop("stack"))
            self[name] = _RECORD_ADAPTER.validate_python(content)

    def add(self, name: str, record: StackRecord) -> None:
        """Record the outcome of a stack."""
        self[name] = record
        self._append({"stack": name, **record._asdict()})

    def has_result_for(self, name: str, key: str, size: int, mtime: int) -> bool:
        """Return whether the stack has a result for this key. Its size and modification time must match."""
        record = self.get(name)
        if record is None or record.problem or not self._has_result(record.result):
            return False
        return (record.key, record.size, record.mtime) == (key, size, mtime)

    def _has_result(self, path: str) -> bool:
        """Return whether a result exists at a path as a file or a Zarr folder."""
        return self._results.has_file(path) or (bool(path) and self._results.has_file(f"{path}/zarr.json"))

    def find_diameter(self, parameters: str) -> tuple[str, str] | None:
        """Return the shared diameter recorded for these parameters, and the note about the diameter, or None."""
        return self._diameters.get(parameters)

    def record_diameter(self, parameters: str, diameter_and_note: tuple[str, str]) -> None:
        """Record the shared diameter for these parameters, and the note about the diameter."""
        self._diameters[parameters] = diameter_and_note
        self._append({"series": parameters, "diameter": diameter_and_note[0], "note": diameter_and_note[1]})

    def _append(self, content: dict[str, Any]) -> None:
        self._results.append(RECORDS_FILE, json.dumps(content))


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
    _write_text(results, REPORT_FILE, page)


def _write_text(results: ResultFolder, name: str, content: str) -> None:
    (results.staging / name).write_text(content, encoding="utf-8")
    results.put(name, name)


def _make_damage_error() -> BadParameter:
    return BadParameter(
        f"{RECORDS_FILE} in the results folder is damaged or was written by a different version of StackSeg. Delete"
        " this file to segment all stacks again."
    )


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


def select_stacks(
    names: Iterable[str], glob: str | None, open_stack: Callable[[str], AbstractContextManager[Path]]
) -> list[str]:
    """Return the sorted names of the stacks among the files and OME-Zarr folders that match a pattern.

    With a pattern, all matching files are stacks, otherwise the files with a known suffix or the content of a TIFF or
    of an OME-Zarr image. Hidden files, files of operating systems and results of this software are never stacks.

    open_stack  context manager that opens a file or folder by name; a file that it cannot open is a stack according to
                its name, so that the run reports the problem

    Raises BadParameter if several stacks would have the same result file.
    """
    visible_names = sorted(name for name in names if not _is_system_file(name))
    stacks = [name for name in visible_names if _is_stack(name, glob, open_stack)]
    names_by_stem = dict[str, str]()
    for name in stacks:
        stem = get_result_stem(name)
        if stem in names_by_stem:
            raise BadParameter(
                f"{names_by_stem[stem]} and {name} would have result files with the same name, {stem}. Rename one of"
                " these stacks, or select stacks with a pattern."
            )
        names_by_stem[stem] = name
    return stacks


def get_result_stem(name: str) -> str:
    """Return the path of a stack without its suffix. The paths of all results of the stack begin with this stem."""
    return str(Path(name).with_name(make_answer_name(Path(name).name, "")))


def measure_stack(stack: Path) -> tuple[int, int]:
    """Return the size of a file or OME-Zarr folder in bytes, and the latest modification time in nanoseconds.

    Raises OSError.
    """
    status = stack.stat()
    if not stack.is_dir():
        return status.st_size, status.st_mtime_ns
    statuses = [(Path(folder) / name).lstat() for folder, _, names in os.walk(stack) for name in names]
    return sum(status.st_size for status in statuses), max(status.st_mtime_ns for status in (status, *statuses))


def _is_system_file(name: str) -> bool:
    return any(part.startswith(".") or part.lower() in _SYSTEM_NAMES for part in PurePath(name).parts)


def _is_stack(name: str, glob: str | None, open_stack: Callable[[str], AbstractContextManager[Path]]) -> bool:
    try:
        with open_stack(name) as path:
            if path.is_dir():
                return not _is_zarr_result(path)
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except (OSError, BadParameter):
        return glob is not None or has_stack_suffix(name)
    if head.startswith(_TIFF_SIGNATURES):
        return not all(word in head for word in _TIFF_RESULT_WORDS)
    if glob is not None:
        return True
    if head.startswith(_ZIP_SIGNATURE):
        return _is_archived_stack(name, head)
    return has_stack_suffix(name)


def _is_archived_stack(name: str, head: bytes) -> bool:
    # Archives with the suffix .zip often contain something else, such as the regions of interest of ImageJ.
    is_other_archive = name.lower().endswith(".zip") or not has_stack_suffix(name)
    return not is_other_archive or any(word in head for word in _ARCHIVED_STACK_NAMES)


def _is_zarr_result(folder: Path) -> bool:
    """Return whether the metadata of an OME-Zarr folder contains the provenance of a result."""
    for name in ("zarr.json", ".zattrs"):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                return _ZARR_RESULT_WORD in file.read(_MAX_METADATA_BYTES)
    return False
