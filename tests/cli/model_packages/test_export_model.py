"""Tests of `stackseg models export`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from service.models.repository import read_spec
from service.models.spec import ModelSpec

Run = Callable[..., str]


@pytest.fixture
def run_export(run_stackseg: Run, bands: ModelSpec) -> Run:
    """Run `stackseg models export` with the model `bands`."""

    def run(path: Path, *options: str, status: int = 0) -> str:
        arguments = ("models", "export", "bands", "--models", bands.folder.parent, "--out", path)
        return run_stackseg(*arguments, *options, status=status)

    return run


@pytest.mark.parametrize("suffix", [".zip", ".onnx", ".pt2"])
def test_exported_file_is_imported_without_options(
    run_export: Run, run_stackseg: Run, bands: ModelSpec, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    assert f"{path}: bands/1, " in run_export(path)
    assert "bands/1" in run_stackseg("models", "import", path, "--models", tmp_path / "models")
    spec = read_spec(tmp_path / "models" / "bands")
    assert (spec.outputs, spec.decoding, spec.input) == (bands.outputs, bands.decoding, bands.input)


def test_existing_file_is_replaced_only_with_force(run_export: Run, tmp_path: Path) -> None:
    path = tmp_path / "bands.onnx"
    path.write_text("other")
    assert "already exists" in run_export(path, status=1)
    assert path.read_text() == "other"
    run_export(path, "--force")
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x.bin", (), "the suffix of .*x.bin is '.bin'; expected .zip, .onnx, .pt2."),
        ("x.onnx", ("--format", "pt2"), "the suffix of .*x.onnx is '.onnx'; expected .pt2."),
        ("missing/x.onnx", (), "the folder .*missing does not exist"),
        ("x.zip", ("--author", "A/B"), "'A/B' is not a name without slashes"),
        ("x.zip", ("--cite", "Smith 2020"), "'Smith 2020' is not a DOI"),
    ],
)
def test_inconsistent_options_are_rejected(
    run_export: Run, tmp_path: Path, name: str, options: tuple[str, ...], message: str
) -> None:
    output = run_export(tmp_path / name, *options, status=1)
    assert re.search(message, output), output
    assert list(tmp_path.iterdir()) == []


def test_authors_and_citations_are_accepted(run_export: Run, tmp_path: Path) -> None:
    output = run_export(tmp_path / "x.zip", "--author", "A. Tester", "--cite", "https://doi.org/10.1234/abc")
    assert "--author" not in output
