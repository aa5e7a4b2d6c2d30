"""The results of a project: their joined table, and their files in the archive. Both are read while they are sent."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import BadZipFile, ZipFile

from service.core.errors import BadParameter
from service.serving.jobs.projects.archive import ArchivedFile, UniquePaths, read_chunks
from service.serving.jobs.projects.store import Member
from service.serving.results.answers import MEASUREMENTS_FILE, RECEIPT_FILE
from service.serving.results.media_types import ARCHIVE_TYPE, TABLE_TYPE, TIFF_TYPE
from service.serving.results.metadata import ResultMetadata, make_answer_name
from service.serving.storage.disk import get_file_size

# Columns that precede the measurements.
ORIGIN_COLUMNS = ("stack", "group", "job", "model")
CHUNK_CHARS = 2**16
# A row becomes at most this many times as long by the columns that precede it and by empty cells.
MAX_GROWTH = 40
# Spreadsheets interpret a cell that begins with one of these characters as a formula.
FORMULA_PREFIXES = tuple("=+-@\t\r")


class MeasuredResult(NamedTuple):
    """A result whose objects are part of the joined table.

    path    file with the result, which may have been deleted
    stack   name of the stack
    group   group in the project
    """

    path: Path
    metadata: ResultMetadata
    stack: str
    group: str
    job: str

    def read_rows(self) -> Generator[list[str], None, None]:
        """Yield the rows of the table, beginning with the names of the columns.

        Yield nothing if the result has no table, or if its file has been deleted or damaged.
        """
        if not has_table(self.metadata):
            return
        with suppress(FileNotFoundError, BadZipFile, KeyError), ExitStack() as exit_stack:
            file: IO[bytes] = exit_stack.enter_context(self.path.open("rb"))
            if self.metadata.media_type == ARCHIVE_TYPE:
                archive = exit_stack.enter_context(ZipFile(file))
                file = exit_stack.enter_context(archive.open(MEASUREMENTS_FILE))
            yield from csv.reader(exit_stack.enter_context(io.TextIOWrapper(file, encoding="utf-8", newline="")))


def join_tables(results: Sequence[MeasuredResult], selected: Collection[str] = ()) -> Generator[bytes, None, None]:
    """Yield the joined table as CSV. The columns of the results differ; missing cells are empty.

    `selected` are the measurements to include, by name without the number of the channel or axis; empty for all.
    Raises BadParameter for the first chunk if a selected column does not exist.
    """
    columns = _list_columns(results)
    if selected:
        columns = _select_columns(columns, selected)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*ORIGIN_COLUMNS, *columns])
    for row in _iterate_rows(results, columns):
        writer.writerow(row)
        if buffer.tell() > CHUNK_CHARS:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def _select_columns(columns: Sequence[str], selected: Collection[str]) -> list[str]:
    base_names = dict.fromkeys(name.partition("-")[0] for name in columns)
    if columns and (unknown_names := [name for name in selected if name not in base_names]):
        raise BadParameter.for_parameter(
            "columns", f"there is no column {unknown_names[0][:80]!r}. The columns are {', '.join(base_names)}."
        )
    return [name for name in columns if name.partition("-")[0] in selected]


def limit_joined_bytes(results: Iterable[MeasuredResult]) -> int:
    """Return an upper limit of the size of a joined table."""
    return MAX_GROWTH * sum(get_file_size(result.path) for result in results if has_table(result.metadata))


def _list_columns(results: Iterable[MeasuredResult]) -> list[str]:
    """Return the names of all measurements, in the order of their first occurrence."""
    columns = dict[str, None]()
    for result in results:
        with closing(result.read_rows()) as rows:
            columns |= dict.fromkeys(next(rows, []))
    return list(columns)


def _iterate_rows(results: Iterable[MeasuredResult], columns: Sequence[str]) -> Iterator[list[str]]:
    for result in results:
        origin = [escape_formula(text) for text in (result.stack, result.group, result.job, result.metadata.model)]
        with closing(result.read_rows()) as rows:
            positions = {name: position for position, name in enumerate(next(rows, []))}
            own_positions = [positions.get(name) for name in columns]
            for row in rows:
                yield [*origin, *("" if position is None else row[position] for position in own_positions)]


def has_table(metadata: ResultMetadata) -> bool:
    """Return whether a result contains a table, because the request had the parameter `measurements`."""
    return metadata.media_type in {ARCHIVE_TYPE, TABLE_TYPE}


def escape_formula(text: str) -> str:
    """Return a cell that spreadsheets do not interpret as a formula."""
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) else text


def split_name(member: Member) -> tuple[list[str], str]:
    """Return the folders of a member in an archive, which begin with its group, and the stem of its file names."""
    *folders, stem = make_answer_name(member.name, "").split("/")
    return [member.group, *folders], stem


def list_result_files(
    path: Path, metadata: ResultMetadata, member: Member, paths: UniquePaths
) -> Iterator[ArchivedFile]:
    """Yield the files of a result for the archive of a project: labels, a table, or the location of saved files."""
    folders, stem = split_name(member)

    def add(folder: str, suffix: str, file: IO[bytes], size: int) -> ArchivedFile:
        return ArchivedFile(paths.make([folder, *folders], stem, suffix), read_chunks(file), size)

    with suppress(FileNotFoundError, BadZipFile):
        if metadata.media_type == ARCHIVE_TYPE:
            with ZipFile(path) as archive:
                for info in archive.infolist():
                    folder = "tables" if info.filename == MEASUREMENTS_FILE else "labels"
                    yield add(folder, f"_{info.filename}", archive.open(info), info.file_size)
            return
        folder, suffix = "saved", f"_{RECEIPT_FILE}"
        if metadata.media_type == TABLE_TYPE:
            folder, suffix = "tables", f"_{MEASUREMENTS_FILE}"
        elif metadata.media_type == TIFF_TYPE:
            folder, suffix = "labels", f"_{metadata.kind}.ome.tif"
        yield add(folder, suffix, path.open("rb"), path.stat().st_size)
