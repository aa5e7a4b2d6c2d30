"""Imports from URLs and from names in a collection, with a local server."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from object_server import serve_objects
from paths import ROOT

from service.__main__ import main
from service.models.repository import read_spec


def find_package() -> Path:
    """Return the folder of a bioimage.io package among the committed test data."""
    return next((ROOT / "tests" / "data" / "plantseg").rglob("rdf.yaml")).parent


def run_import(location: str, models: Path, *options: str) -> int:
    return main(["models", "import", location, "--models", str(models), *options])


def assert_nothing_remains(models: Path) -> None:
    assert not list(models.glob(".download-*"))


def test_package_is_imported_from_its_archive_and_names(tmp_path: Path) -> None:
    """The names refer to the URL of a description."""
    served, models = tmp_path / "served", tmp_path / "models"
    shutil.copytree(find_package(), served / "model")
    archive = Path(shutil.make_archive(str(served / "model"), "zip", find_package()))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    entry = {"type": "model", "id": "10.5281/zenodo.1", "nickname": "tidy-snail", "rdf_source": "model/rdf.yaml"}
    (served / "collection.json").write_text(json.dumps({"collection": [entry]}))
    with serve_objects(served) as server:
        collection = ["--collection", f"{server.url}/collection.json"]
        assert run_import(f"{server.url}/model.zip", models, "--sha256", digest, "--name", "archive") == 0
        for name, location in (("nickname", "tidy-snail"), ("doi", "10.5281/zenodo.1")):
            assert run_import(location, models, *collection, "--name", name) == 0
        assert run_import("tidy-whale", models, *collection) == 1
    specs = [read_spec(models / name) for name in ("archive", "nickname", "doi")]
    assert len({spec.weights.sha256 for spec in specs}) == 1
    assert_nothing_remains(models)


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_damaged_packages_are_refused(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    served, models = tmp_path / "served", tmp_path / "models"
    shutil.copytree(find_package(), served)
    weights = next(path for path in served.iterdir() if path.suffix in {".pt", ".pytorch", ".pth"})
    if fault == "changed":
        weights.write_bytes(weights.read_bytes()[::-1])
    with serve_objects(served) as server:
        if fault == "missing":
            server.faults[weights.name] = 404
        assert run_import(f"{server.url}/rdf.yaml", models) == 1
    expected = {"changed": "SHA-256", "missing": "status 404"}
    assert expected[fault] in capsys.readouterr().err
    assert_nothing_remains(models)
    assert not list(models.glob("*"))
