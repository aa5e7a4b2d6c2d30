"""Records of a run on a folder of stacks survive crashes, and damaged records are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.core.errors import BadParameter
from service.serving.jobs.folders.records import RECORDS_FILE, RecordFile, StackRecord
from service.serving.storage.result_folder import ResultFolder, open_results


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultFolder]:
    with open_results(tmp_path) as result_folder:
        yield result_folder


VALID_RECORD = {"stack": "a.tif", "key": "k", "size": 1, "mtime": 2, "notes": ["seen"], "seconds": 1}


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        '{"later": 1}',
        "[]",
        "3",
        *(
            json.dumps(VALID_RECORD | invalid)
            for invalid in ({"stack": 3}, {"size": "1"}, {"notes": [1]}, {"later": 1})
        ),
        '{"series": "k", "diameter": 15, "note": ""}',
        '{"series": ["k"], "diameter": "15px", "note": ""}',
    ],
)
def test_damaged_records_are_reported(results: ResultFolder, tmp_path: Path, line: str) -> None:
    (tmp_path / RECORDS_FILE).write_text(f"{line}\n")
    with pytest.raises(
        BadParameter, match=r"stacks\.jsonl .* is damaged or was written by a different version of StackSeg. Delete"
    ):
        RecordFile(results)


def test_records_survive_a_round_trip(results: ResultFolder, tmp_path: Path) -> None:
    (tmp_path / RECORDS_FILE).write_text(f"{json.dumps(VALID_RECORD)}\n")
    records = RecordFile(results)
    assert records == {"a.tif": StackRecord("k", 1, 2, notes=["seen"], seconds=1)}
    records.add("b.tif", expected := StackRecord("k", 1, 2, "b_labels.ome.tif", 3, 0.5, ("seen", "doubted"), "", True))
    record = RecordFile(results)["b.tif"]
    assert record._replace(notes=tuple(record.notes)) == expected


def test_incomplete_last_record_is_ignored(results: ResultFolder, tmp_path: Path) -> None:
    records = RecordFile(results)
    records.record_diameter("key", ("15px", "seen"))
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write('{"stack": "a.tif", "ke')
    reopened = RecordFile(results)
    assert (reopened.find_diameter("key"), len(reopened)) == (("15px", "seen"), 0)
    reopened.record_diameter("other", ("", ""))
    assert RecordFile(results).find_diameter("other") == ("", "")


def test_symbolic_link_in_place_of_the_records_is_not_followed(results: ResultFolder, tmp_path: Path) -> None:
    secret = tmp_path.parent / "secret"
    secret.write_text("confidential")
    (tmp_path / RECORDS_FILE).symlink_to(secret)
    with pytest.raises(BadParameter, match="damaged"):
        RecordFile(results)
    assert secret.read_text() == "confidential"
