"""Model folders: what is read, and what is refused with the name of the fault."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.core.errors import BrokenModel, UnknownModel
from service.models.repository import default_name, read_repository, read_spec, select_model
from service.models.spec import Classes, Instances, ModelSpec, Sample

WEIGHTS = b"any bytes: the repository compares them with their hash and never parses them"

INSTANCES: dict[str, Any] = {
    "name": "cells",
    "version": "2.1",
    "summary": "Cells.",
    "licence": "Apache-2.0",
    "training_data": "None.",
    "architecture": {"name": "ShuffleUNet", "arguments": {"in_channels": 2, "out_channels": 2}},
    "weights": {"sha256": hashlib.sha256(WEIGHTS).hexdigest()},
    "input": {
        "channels": 2,
        "channel_names": ["nuclei", "membranes"],
        "voxel_size": [0.5, 0.25, 0.25],
        "normalisation": {"kind": "percentile"},
        "roi_size": [32, 64, 64],
    },
    "outputs": ["foreground", "distance"],
    "decoding": {"kind": "instances"},
}

Write = Callable[..., Path]


def write_folder(folder: Path, content: Any = INSTANCES, weights: bytes | None = WEIGHTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if weights is not None:
        (folder / "weights.safetensors").write_bytes(weights)
    return folder


def changed(path: str, value: Any) -> dict[str, Any]:
    """INSTANCES with the key at `a.b` set."""
    *sections, key = path.split(".")
    content = yaml.safe_load(yaml.safe_dump(INSTANCES))
    inner = content
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return content


def valid(content: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate(content | {"folder": Path()})


def test_spec_says_what_the_file_says(tmp_path: Path) -> None:
    spec = read_spec(write_folder(tmp_path / "cells"))
    assert spec.identifier == "cells/2.1"
    assert spec.weights_path == tmp_path / "cells" / "weights.safetensors"
    assert spec.input.roi_size == (32, 64, 64)
    assert spec.input.voxel_size == (0.5, 0.25, 0.25)
    assert spec.input.channel_names == ("nuclei", "membranes")
    assert isinstance(spec.decoding, Instances)
    assert "folder" not in spec.model_dump()


def test_fixture_model_is_one_of_classes(bands: ModelSpec) -> None:
    assert isinstance(bands.decoding, Classes)
    assert bands.outputs == ("background", "dim", "bright")


def test_spec_cannot_change_later(tmp_path: Path) -> None:
    spec = read_spec(write_folder(tmp_path))
    with pytest.raises(ValidationError):
        spec.input.roi_size = (1, 1, 1)  # type: ignore[misc]


def test_other_weights_than_the_stated_ones_are_refused_with_both_hashes(tmp_path: Path) -> None:
    other = WEIGHTS[:-1] + b"?"
    with pytest.raises(BrokenModel) as caught:
        read_spec(write_folder(tmp_path, weights=other))
    for part in ("weights.safetensors", hashlib.sha256(other).hexdigest(), INSTANCES["weights"]["sha256"], "restore"):
        assert part in str(caught.value)


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"weights\.safetensors: the weights cannot be read: No such file"):
        read_spec(write_folder(tmp_path, weights=None))


@pytest.mark.parametrize(
    "key", ["verison", "weights.sha1", "input.roi", "input.normalisation.percentiles", "decoding.treshold", "code"]
)
def test_misspelt_key_is_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=rf"model\.yaml: .*{key.rpartition('.')[2]}: Extra inputs"):
        read_spec(write_folder(tmp_path, changed(key, 1)))


@pytest.mark.parametrize("key", [key for key in INSTANCES if key != "decoding"])
def test_missing_key_is_refused_by_name(key: str, tmp_path: Path) -> None:
    content = {name: value for name, value in INSTANCES.items() if name != key}
    with pytest.raises(BrokenModel, match=rf"{key}: (Field required|safetensors need one)"):
        read_spec(write_folder(tmp_path, content))


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("format", 2, "format: "),
        ("name", "Nuclei", "name: "),
        ("name", "../nuclei", "name: "),
        ("version", "", "version: "),
        ("weights.sha256", "0" * 63, "weights.sha256: "),
        ("input.channels", 0, "input.channels: "),
        ("input.channel_names", ["nuclei"], "one name per channel"),
        ("input.voxel_size", [0.5, 0.25], "input.voxel_size"),
        ("input.voxel_size", [0.5, 0.25, -1], "input.voxel_size"),
        ("input.roi_size", [64, 64], "input.roi_size"),
        ("input.roi_size", [64, 0, 64], "input.roi_size"),
        ("input.normalisation", {"kind": "magic"}, "input.normalisation"),
        ("input.normalisation", {"kind": "percentile", "low": 99, "high": 1}, ": low must be below high"),
        ("input.normalisation", {"kind": "range", "low": 3, "high": 3}, "low and high must differ"),
        ("outputs", [], "outputs: "),
        ("outputs", ["distance", "distance"], "a name of its own"),
        ("outputs", ["inside", "distance"], "no output named 'foreground'"),
        ("decoding.foreground", "nucleus", "no output named 'nucleus'"),
        ("decoding.threshold", 1.0, "decoding.instances.threshold"),
        ("decoding", {"kind": "guess"}, "decoding: "),
        ("activation", "relu", "activation: "),
    ],
)
def test_contradiction_is_refused_with_its_key(key: str, value: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel) as caught:
        read_spec(write_folder(tmp_path, changed(key, value)))
    assert fault in str(caught.value)
    assert "model.yaml" in str(caught.value)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    content = changed("input.channels", 0) | {"version": ""}
    with pytest.raises(BrokenModel, match=r"version: .*; input\.channels: "):
        read_spec(write_folder(tmp_path, content))


folder_parts = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=8)


@given(st.one_of(st.tuples(folder_parts, folder_parts).map("/".join), st.sampled_from(["", ".", ".."])))
def test_files_outside_the_folder_cannot_be_named(file: str) -> None:
    for key in ("weights.file", "sample.input", "sample.expected"):
        with pytest.raises(ValidationError, match="must be a plain file name inside the model folder"):
            valid(changed(key, file))


def test_plain_file_names_can_be_named() -> None:
    spec = valid(changed("sample", {"input": "stack.tif", "expected": "labels.tif"}))
    assert spec.sample == Sample(input="stack.tif", expected="labels.tif")


@pytest.mark.parametrize("text", ["[1, 2]", "", "name: {", "name: !!python/name:os.system"])
def test_file_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"model\.yaml: "):
        read_spec(tmp_path)


def test_keys_that_are_no_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="Keys should be strings"):
        read_spec(write_folder(tmp_path, {**INSTANCES, 1: 2}))


def test_repository_holds_every_model_by_name(tmp_path: Path) -> None:
    for name in ("zebra", "ants"):
        write_folder(tmp_path / name, changed("name", name))
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("no model", encoding="utf-8")
    assert list(read_repository(tmp_path)) == ["ants", "zebra"]
    assert list(read_repository(tmp_path, ("zebra",))) == ["zebra"]


def test_broken_neighbour_hurts_only_those_who_serve_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "cells")
    write_folder(tmp_path / "broken", changed("name", "broken"), weights=b"")
    assert list(read_repository(tmp_path, ("cells",))) == ["cells"]
    with pytest.raises(BrokenModel, match="broken"):
        read_repository(tmp_path)


def test_name_that_two_folders_claim_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "first")
    write_folder(tmp_path / "second")
    with pytest.raises(BrokenModel, match=r"second: the name 'cells' is taken by .*first"):
        read_repository(tmp_path)


def test_repository_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"holds no \*/model\.yaml"):
        read_repository(tmp_path)
    with pytest.raises(BrokenModel, match=r"is not a folder; set models\.folder"):
        read_repository(tmp_path / "nowhere")
    with pytest.raises(BrokenModel, match=r"repository nowhere is not a folder of the working directory; set"):
        read_repository(Path("nowhere"))


def test_model_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "cells")
    with pytest.raises(BrokenModel, match=r"plants.model\.yaml: cannot be read"):
        read_repository(tmp_path, ("plants",))


@pytest.mark.parametrize(
    ("name", "default", "chosen"),
    [("cells", None, 2), (None, "cells", 2), (None, None, 1), ("nuclei", "cells", 1), ("", None, 1)],
)
def test_model_is_chosen_by_name_then_by_default_then_by_order(
    name: str | None, default: str | None, chosen: int
) -> None:
    assert select_model({"nuclei": 1, "cells": 2}, name, default) == chosen


@pytest.mark.parametrize(
    ("served", "name"), [(["cells", "nuclei"], "nuclei"), (["cells", "plants"], "cells"), ([], None)]
)
def test_without_a_default_nuclei_answer_or_the_first_by_name(served: list[str], name: str | None) -> None:
    assert default_name(served) == name


@pytest.mark.parametrize(
    ("models", "name", "told"),
    [
        ({"nuclei": 1, "cells": 2}, "livers", "no model 'livers'; served are: nuclei, cells"),
        ({}, "livers", "no model 'livers'; served are: none"),
        ({}, None, "No model is served"),
    ],
)
def test_choice_that_is_not_there_is_refused_with_those_that_are(
    models: dict[str, int], name: str | None, told: str
) -> None:
    with pytest.raises(UnknownModel, match=told):
        select_model(models, name, None)
