"""Tests of reading model files, and of errors that contain the invalid key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import INSTANCES, change_instances, write_folder
from pydantic import ValidationError

from service.core.errors import BrokenModel
from service.models.repository import read_spec
from service.models.spec import ModelSpec, Sample
from service.models.spec_parts import MONAI_TILING, Instances, Tiling


def test_spec_contains_the_keys_of_the_file(tmp_path: Path) -> None:
    sample = {"input": "stack.tif", "expected": "labels.tif"}
    spec = read_spec(write_folder(tmp_path / "cells", change_instances("sample", sample)))
    assert spec.sample == Sample(**sample)
    assert spec.identifier == "cells/2.1"
    assert spec.weights_path == tmp_path / "cells" / "weights.safetensors"
    assert spec.input.roi_size == (32, 64, 64)
    assert spec.input.voxel_size == (0.5, 0.25, 0.25)
    assert spec.input.channel_names == ("nuclei", "membranes")
    assert isinstance(spec.decoding, Instances)
    assert "folder" not in spec.model_dump()


@pytest.mark.parametrize(
    "key", ["verison", "weights.sha1", "input.roi", "input.normalisation.percentiles", "decoding.treshold", "code"]
)
def test_error_for_an_unknown_key_contains_its_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=rf"model\.yaml: .*{key.rpartition('.')[2]}: Extra inputs"):
        read_spec(write_folder(tmp_path, change_instances(key, 1)))


@pytest.mark.parametrize("key", [key for key in INSTANCES if key != "decoding"])
def test_error_for_a_missing_key_contains_its_name(key: str, tmp_path: Path) -> None:
    content = {name: value for name, value in INSTANCES.items() if name != key}
    with pytest.raises(BrokenModel, match=rf"{key}: (Field required|this key is required for safetensors)"):
        read_spec(write_folder(tmp_path, content))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
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
        ("input.normalisation", [{"kind": "zscore"}], "one mapping for each of the 2 channels"),
        ("input.tiling", "other", "input.tiling"),
        ("input.mirror_axes", ["t"], "input.mirror_axes"),
        ("input.default_diameter", "wide", "input.default_diameter: Expected a diameter"),
        ("input.default_diameter", "2,5,5px", "input.default_diameter requires input.diameter"),
        ("input.crop_zeros", True, "input.crop_zeros requires"),
        ("decoding", {"kind": "regions", "classes": [1]}, "one class for each of the 2 outputs"),
        ("decoding", {"kind": "regions", "classes": [1, 0]}, "decoding.regions.classes.1"),
        ("summary", "Cells.\x1b]0;title\x07", "summary: "),
        ("licence", "a\rb", "licence: "),
        ("outputs", ["foreground\n", "distance"], "outputs.0: "),
        ("input.channel_names", ["nuclei", "\x01"], "input.channel_names.1: "),
        ("outputs", [], "outputs: "),
        ("outputs", ["distance", "distance"], "the names of outputs must be unique"),
        ("outputs", ["inside", "distance"], "no output named 'foreground'"),
        ("decoding.foreground", "nucleus", "no output named 'nucleus'"),
        ("decoding.threshold", 1.0, "decoding.instances.threshold"),
        ("decoding", {"kind": "guess"}, "decoding: "),
        ("decoding", {"kind": "boundaries"}, "no output named 'boundary'"),
        ("decoding", {"kind": "boundaries", "boundary": "distance", "beta": 1}, "decoding.boundaries.beta"),
        ("decoding", {"kind": "boundaries", "watershed_sigma": 1e9}, "decoding.boundaries.watershed_sigma"),
        ("activation", "relu", "should be 'none', 'sigmoid' or 'softmax'"),
        ("activation", "softmax", "it cannot be used with `decoding.kind: instances`"),
        ("activation", {"foreground": "sigmoid"}, "one function for each of the outputs foreground, distance"),
        ("activation", {"foreground": "sigmoid", "distance": "softmax"}, "activation.distance: "),
    ],
)
def test_error_for_an_invalid_value_contains_its_key(key: str, value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel) as caught:
        read_spec(write_folder(tmp_path, change_instances(key, value)))
    assert problem in str(caught.value)
    assert "model.yaml" in str(caught.value)


@pytest.mark.parametrize("changes", [{"activation": "softmax"}, {"decoding": {"kind": "classes"}}], ids=str)
def test_comparisons_of_a_single_output_are_rejected(changes: dict[str, Any], tmp_path: Path) -> None:
    """Every voxel would have a probability of 1, or the class 0."""
    decoding = {"kind": "instances", "distance": "foreground"}
    instances = INSTANCES | {"outputs": ["foreground"], "activation": "sigmoid", "decoding": decoding}
    assert read_spec(write_folder(tmp_path, instances)).get_activation("foreground") == "sigmoid"
    with pytest.raises(BrokenModel, match=r"there is only one, 'foreground'|cannot be used with"):
        read_spec(write_folder(tmp_path, instances | changes))


folder_parts = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=8)


@given(st.one_of(st.tuples(folder_parts, folder_parts).map("/".join), st.sampled_from(["", ".", ".."])))
def test_files_outside_the_model_folder_are_rejected(file: str) -> None:
    for key in ("weights.file", "sample.input", "sample.expected"):
        with pytest.raises(ValidationError, match="must be a plain file name inside the model folder"):
            ModelSpec.model_validate(change_instances(key, file) | {"folder": Path()})


RAYS = {"count": 4}
STAR_CONVEX: dict[str, Any] = {
    "outputs": ["probability", "up", "down", "left", "right"],
    "activation": {"probability": "sigmoid", "up": "none", "down": "none", "left": "none", "right": "none"},
    "decoding": {"kind": "star-convex", "rays": RAYS, "grid": [1, 2, 2]},
}


def test_scores_of_star_convex_models_may_be_coarser_than_voxels(tmp_path: Path) -> None:
    spec = read_spec(write_folder(tmp_path / "coarse", INSTANCES | STAR_CONVEX))
    assert spec.tiling == Tiling("stardist", spec.input.roi_multiple or (1, 2, 2), (1, 2, 2))
    assert (spec.has_objects, spec.probability_outputs) == (True, ("probability",))
    other = read_spec(write_folder(tmp_path / "fine", INSTANCES))
    assert other.tiling == MONAI_TILING


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"decoding": {"kind": "star-convex", "rays": {"count": 5}}}, "5 rays require 6 outputs, not 5"),
        ({"decoding": {"kind": "star-convex", "rays": RAYS, "grid": [1, 3, 3]}}, "multiples of decoding.grid"),
        ({"decoding": {"kind": "star-convex", "rays": RAYS, "grid": [0, 1, 1]}}, "greater than 0"),
        ({"input": INSTANCES["input"] | {"tiling": "nnunet"}}, "do not apply"),
        ({"input": INSTANCES["input"] | {"padding": "mirror"}}, "do not apply"),
        ({"activation": "sigmoid"}, "need the activation none"),
        ({"activation": "softmax"}, "need the activation none"),
        ({"activation": {"probability": "sigmoid"}}, "one function for each of the outputs"),
        ({"decoding": {"kind": "star-convex", "rays": {"count": 2**40}}}, "less than or equal to 1024"),
    ],
    ids=str,
)
def test_inconsistent_star_convex_models_are_rejected(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=problem):
        read_spec(write_folder(tmp_path, INSTANCES | STAR_CONVEX | changes))
