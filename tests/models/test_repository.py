"""Tests of model folders and the model repository: weights, names, and the choice of the default model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from model_files import INSTANCES, WEIGHTS, change_instances, write_folder

from service.core.errors import BrokenModel, ConfigError, UnknownModel
from service.models.repository import read_repository, read_spec, select_model


def test_error_for_changed_weights_contains_both_hashes(tmp_path: Path) -> None:
    changed_weights = WEIGHTS[:-1] + b"?"
    with pytest.raises(BrokenModel) as caught:
        read_spec(write_folder(tmp_path, weights=changed_weights))
    for part in (
        "weights.safetensors",
        hashlib.sha256(changed_weights).hexdigest(),
        INSTANCES["weights"]["sha256"],
        "restore",
    ):
        assert part in str(caught.value)


def test_error_for_missing_weights_contains_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"weights\.safetensors: the weights cannot be read: No such file"):
        read_spec(write_folder(tmp_path, weights=None))


def test_weights_that_are_not_a_regular_file_are_rejected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, weights=None)
    os.mkfifo(folder / "weights.safetensors")
    with pytest.raises(BrokenModel, match="not a regular file"):
        read_spec(folder)
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").symlink_to("/dev/zero")
    with pytest.raises(BrokenModel, match="not a regular file"):
        read_spec(folder)


@pytest.mark.parametrize("text", ["[1, 2]", "", "name: {"])
def test_model_file_that_is_not_a_mapping_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"model\.yaml: "):
        read_spec(tmp_path)


def test_keys_that_are_not_strings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="Keys should be strings"):
        read_spec(write_folder(tmp_path, {**INSTANCES, 1: 2}))


def test_repository_contains_every_model_by_name(tmp_path: Path) -> None:
    for name in ("zebra", "ants"):
        write_folder(tmp_path / name, change_instances("name", name))
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("no model", encoding="utf-8")
    assert list(read_repository(tmp_path)) == ["ants", "zebra"]
    assert list(read_repository(tmp_path, ("zebra",))) == ["zebra"]


def test_broken_model_does_not_affect_other_models(tmp_path: Path) -> None:
    write_folder(tmp_path / "cells")
    write_folder(tmp_path / "broken", change_instances("name", "broken"), weights=b"")
    assert list(read_repository(tmp_path, ("cells",))) == ["cells"]
    with pytest.raises(BrokenModel, match="broken"):
        read_repository(tmp_path)


def test_duplicate_model_name_is_rejected(tmp_path: Path) -> None:
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second")
    with pytest.raises(BrokenModel, match=r"second: the name 'cells' is already used by .*first"):
        read_repository(tmp_path)


def test_repository_without_models_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no folder with a model\.yaml file; set .* models\.folder"):
        read_repository(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a folder; set --models"):
        read_repository(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"repository nowhere is not a folder in the working directory; set"):
        read_repository(Path("nowhere"))
    write_folder(tmp_path / "first")
    with pytest.raises(
        ConfigError, match=rf"first is a single model; specify the folder that contains it, {tmp_path}\.$"
    ):
        read_repository(tmp_path / "first")


def test_bundled_models_are_used_if_no_folder_is_specified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(read_repository(None)) == ["embryos", "membranes", "nuclei", "tissue"]
    assert list(read_repository(None, ("tissue",))) == ["tissue"]


def test_error_for_a_missing_model_contains_its_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "cells")
    with pytest.raises(BrokenModel, match=r"plants.model\.yaml: the file cannot be read"):
        read_repository(tmp_path, ("plants",))


@pytest.mark.parametrize(
    ("served_names", "name", "default", "expected_name"),
    [
        ("cells nuclei", "cells", None, "cells"),
        ("cells nuclei", None, "cells", "cells"),
        ("cells nuclei", "nuclei", "cells", "nuclei"),
        ("cells nuclei", None, None, "nuclei"),
        ("cells plants", "", None, "cells"),
    ],
)
def test_model_is_selected_by_name_then_by_default_then_nuclei_or_the_first(
    served_names: str, name: str | None, default: str | None, expected_name: str
) -> None:
    assert (
        select_model({served_name: served_name for served_name in served_names.split()}, name, default) == expected_name
    )


def test_error_for_an_unknown_model_lists_the_available_ones() -> None:
    with pytest.raises(UnknownModel, match="no model 'livers'; the available models are: nuclei, cells"):
        select_model({"nuclei": 1, "cells": 2}, "livers", None)
