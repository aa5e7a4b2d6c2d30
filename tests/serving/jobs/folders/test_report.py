"""The table and the report of a run on a folder of stacks escape the names of stacks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.serving.jobs.folders.records import StackRecord
from service.serving.jobs.folders.report import write_report, write_table
from service.serving.storage.result_folder import ResultFolder, open_results


@pytest.fixture
def results(tmp_path: Path) -> Iterator[ResultFolder]:
    with open_results(tmp_path) as result_folder:
        yield result_folder


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *((name, f"./{name}") for name in ("=1+1.tif", "+a.tif", "-a.tif", "@a.tif")),
        ("\ta.tif", "\\ta.tif"),
        ("\ra\n.tif", "\\ra\\n.tif"),
    ],
)
def test_table_escapes_stack_names_that_are_formulas_or_contain_line_breaks(
    results: ResultFolder, tmp_path: Path, name: str, cell: str
) -> None:
    (tmp_path / "a_objects.csv").write_text("label\n1\n")
    write_table(results, [(name, "a"), ("inner/=b.tif", "a")])
    with (tmp_path / "objects.csv").open(newline="") as file:
        assert [row["stack"] for row in csv.DictReader(file)] == [cell, "inner/=b.tif"]


def test_undecodable_stack_names_are_escaped(results: ResultFolder, tmp_path: Path) -> None:
    name = "a\udcff<b>.tif"
    write_report(results, "nuclei/1", [(name, "a\udcff<b>", StackRecord("key", 1, 1, "a\udcff.tif", 2))])
    (tmp_path / "a_objects.csv").write_text("label\n1\n")
    write_table(results, [(name, "a")])
    assert "&lt;b&gt;" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "objects.csv").read_text() == "stack,label\na\\udcff<b>.tif,1\n"
