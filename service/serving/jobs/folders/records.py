"""Records of the stacks that a run has processed, from which an interrupted run is resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from service.core.errors import BadParameter
from service.serving.storage.result_folder import ResultFolder

RECORDS_FILE = "stacks.jsonl"


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
            results.put_text(RECORDS_FILE, "".join(f"{line}\n" for line in lines[:-1]))

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


def _make_damage_error() -> BadParameter:
    return BadParameter(
        f"{RECORDS_FILE} in the results folder is damaged or was written by a different version of StackSeg. Delete"
        " this file to segment all stacks again."
    )
