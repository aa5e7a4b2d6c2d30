"""The examples in docstrings and in the README run against a real server."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import stackseg_client
import tifffile
from live import as_tiff
from paths import ROOT
from stackseg_client import Client

SAMPLE = ROOT / "models" / "nuclei" / "sample.tif"
MODULES = [f"stackseg_client.{module.name}" for module in pkgutil.iter_modules(stackseg_client.__path__)]
README = ROOT / "clients" / "python" / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the examples, with a stack and a folder of stacks."""
    (tmp_path / "stacks").mkdir()
    for name in ("sample.tif", "stack.tif", "stacks/a.tif"):
        (tmp_path / name).write_bytes(as_tiff(tifffile.imread(SAMPLE)[:32, :96, :96]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_in_docstrings_print_what_they_say(
    folder: Path, nuclei_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server of `local` starts sooner without an engine for this processor.
    monkeypatch.setenv("STACKSEG_ENGINE__KIND", "eager")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    with Client(nuclei_url) as client:
        names = {"client": client, "url": nuclei_url, "stack": tifffile.imread("sample.tif")}
        for module in map(importlib.import_module, MODULES):
            for example in doctest.DocTestFinder().find(module, extraglobs=names):
                runner.run(example)
    assert runner.tries > 25
    assert runner.failures == 0


def test_examples_in_the_readme_run(folder: Path, nuclei_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    names: dict[str, object] = {}
    for block in blocks:
        # The docstring of `local` has the same example.
        if "local(" not in block:
            exec(block.replace("http://localhost:8000", nuclei_url), names)
    printed = capsys.readouterr().out
    for text in ("(32, 96, 96) 16 (0.5, 0.2, 0.2)", "Inspection(axes='ZYX'", "done 100%", "1 of 1: stacks/a.tif"):
        assert text in printed
    assert "overlap {} " in printed
    assert {"labels.npy", "labels.tif", "labels.csv"} < {path.name for path in folder.iterdir()}
    client = names["client"]
    assert isinstance(client, Client)
    client.close()


def test_readme_begins_with_labels() -> None:
    first_lines = README.read_text(encoding="utf-8").splitlines()[:10]
    assert any("result.labels" in line for line in first_lines)
