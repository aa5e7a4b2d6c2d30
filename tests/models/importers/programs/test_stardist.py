"""Tests of importing the folders of StarDist models, which `scripts/fixtures/stardist.py` has created."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from importing import import_model
from paths import ROOT

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.importers.programs import stardist
from service.models.spec import ModelSpec
from service.models.spec_parts import Tiling

FIXTURES = ROOT / "tests" / "data" / "stardist"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a model that may be modified."""
    return Path(shutil.copytree(FIXTURES / "unet", tmp_path / "my-model"))


def edit(folder: Path, **changes: Any) -> None:
    """Change settings in config.json. None deletes a setting."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_description_is_complete(folder):
    draft = stardist.read(folder)
    spec = ModelSpec(**draft.content, weights={"sha256": "0" * 64}, folder=folder)
    assert (spec.name, spec.network_name, spec.input.channels) == ("my-model", "StarDistUNet", 1)
    assert spec.decoding.rays.model_dump() == {"kind": "golden-spiral", "count": 32, "anisotropy": (2.0, 1.0, 1.0)}
    assert (spec.tiling, spec.input.roi_size) == (Tiling("stardist", (1, 8, 8), (1, 2, 2)), (52, 96, 96))
    thresholds = json.loads((folder / "thresholds.json").read_text())
    assert (spec.decoding.threshold, spec.decoding.nms_threshold) == (thresholds["prob"], thresholds["nms"])
    assert spec.input.normalisation.model_dump() == {
        "kind": "percentile",
        "low": 1.0,
        "high": 99.8,
        "eps": 0.0,
        "clip": None,
    }
    assert any("percentiles 1 and 99.8" in note for note in draft.notes)
    assert any("2 : 1 : 1" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("of_rays", "of_objects", "expected"),
    [
        (None, None, None),
        ([3, 1, 1], None, [3, 1, 1]),
        ([3, 1, 1], [2, 1, 1], [3, 1, 1]),
        # As in `stardist.models.Config3D`.
        (None, [2, 1, 1], [2, 1, 1]),
    ],
)
def test_rays_without_anisotropy_have_that_of_the_objects(folder, of_rays, of_objects, expected):
    rays = {"name": "Rays_GoldenSpiral", "kwargs": {"n": 32, "anisotropy": of_rays}}
    edit(folder, rays_json=rays, anisotropy=of_objects)
    assert stardist.read(folder).content["decoding"]["rays"]["anisotropy"] == expected


def test_missing_thresholds_are_replaced_by_defaults_with_a_note(folder):
    (folder / "thresholds.json").unlink()
    draft = stardist.read(folder)
    assert draft.content["decoding"]["threshold"] == 0.5
    assert any("no thresholds.json" in note for note in draft.notes)


def test_heads_for_classes_are_ignored_with_a_note(folder):
    edit(folder, n_classes=2)
    assert any("predicts 2 classes" in note for note in stardist.read(folder).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_dim": 2}, "n_dim is 2.*Train a StarDist3D model"),
        ({"n_rays": None}, "n_rays is missing"),
        ({"axes": "XYZC"}, "axes"),
        ({"backbone": "mrcnn"}, "backbone"),
        ({"unet_activation": "leaky_relu"}, "unet_activation: 'leaky_relu'"),
        ({"unet_attention": True}, "attention"),
        ({"rays_json": {"name": "__import__('os').abort", "kwargs": {}}}, "rays_json"),
        ({"rays_json": {"name": "Rays_GoldenSpiral", "kwargs": {"n": 31, "anisotropy": None}}}, "expected 32 rays"),
        ({"anisotropy": [0, 1, 1]}, "anisotropy"),
        ({"unet_n_depth": 1}, "middle_0/kernel has the shape"),
        ({"unet_n_filter_base": 4}, "shape"),
        ({"unet_n_filter_base": 4096}, "smaller than the weights"),
        ({"unet_n_conv_per_depth": 10**9}, "n_conv_per_depth"),
        ({"unet_batch_norm": True}, "batch_normalization"),
        ({"grid": [1, 4, 4]}, "layers named conv3d"),
        ({"grid": [1, 3, 3]}, "powers of two"),
        ({"n_channel_in": 2}, "shape"),
        ({"train_patch_size": "large"}, "train_patch_size"),
    ],
)
def test_unsupported_settings_are_named(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(UnsupportedPackage, match=message):
        stardist.read(folder)


@pytest.mark.parametrize("thresholds", [{"prob": 1.5, "nms": 0.4}, {"prob": "high", "nms": 0.4}, {"prob": 0.5}])
def test_invalid_thresholds_are_rejected(folder, thresholds):
    (folder / "thresholds.json").write_text(json.dumps(thresholds))
    with pytest.raises(UnsupportedPackage, match=r"thresholds\.json"):
        stardist.read(folder)


def test_names_of_older_versions_of_keras_are_read(folder):
    expected = stardist.read(folder).tensors
    with h5py.File(folder / "weights_best.h5", "r+") as file:
        for layer in file.values():
            names = list(layer.attrs["weight_names"])
            for name in names:
                layer.move(name, f"{name}:0")
            layer.attrs["weight_names"] = [f"{name}:0".encode() for name in names]
        # Keras numbers the layers of all models of a process.
        for number in (1, 0):
            file.move("conv3d" + "_1" * number, f"conv3d_{17 + number}")
    tensors = stardist.read(folder).tensors
    assert tensors.keys() == expected.keys()
    assert all(bool((tensors[name] == tensor).all()) for name, tensor in expected.items())


def replace_dataset(folder: Path, create: Any) -> None:
    """Replace the kernel of the head `prob` by what `create` puts into its group."""
    with h5py.File(folder / "weights_best.h5", "r+") as file:
        group = file["prob/prob"]
        name = next(key for key in group if key.startswith("kernel"))
        values = group[name][()]
        del group[name]
        create(group, name, values)


def add_external_link(group, name, values):
    group[name] = h5py.ExternalLink("/etc/hostname", "/")


def add_soft_link(group, name, values):
    group[name] = h5py.SoftLink("/dist/dist/kernel")


def add_external_storage(group, name, values):
    group.create_dataset(name, values.shape, "f4", external=[("/etc/hostname", 0, values.nbytes)])


def add_virtual_dataset(group, name, values):
    layout = h5py.VirtualLayout(values.shape, "f4")
    layout[:] = h5py.VirtualSource("other.h5", "data", values.shape)
    group.create_virtual_dataset(name, layout)


def add_absurd_shape(group, name, values):
    group.create_dataset(name, (2**20, 2**20, 1, 1, 1), "f4", chunks=(1, 1, 1, 1, 1))


def add_unwritten_chunks(group, name, values):
    group.create_dataset(name, values.shape, "f4", chunks=values.shape)


def add_nan(group, name, values):
    group[name] = np.full_like(values, np.nan)


def add_strings(group, name, values):
    group[name] = np.full(values.shape, b"x")


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (add_external_link, "link"),
        (add_soft_link, "link"),
        (add_external_storage, "another file"),
        (add_virtual_dataset, "another file"),
        (add_absurd_shape, "shape"),
        (add_unwritten_chunks, "incomplete"),
        (add_nan, "NaN"),
        (add_strings, "floating-point"),
        (lambda group, name, values: None, "missing"),
    ],
)
def test_hostile_weights_are_rejected(folder, create, message):
    replace_dataset(folder, create)
    with pytest.raises(UnsupportedPackage, match=message):
        stardist.read(folder)


def test_damaged_weights_are_rejected(folder):
    weights = folder / "weights_best.h5"
    weights.write_bytes(weights.read_bytes()[:20_000] + bytes(weights.stat().st_size - 20_000))
    with pytest.raises((UnsupportedPackage, OSError, RuntimeError, KeyError)):
        stardist.read(folder)
    weights.write_bytes(b"not HDF5" * 50_000)
    with pytest.raises(UnsupportedPackage, match="not an HDF5 file"):
        stardist.read(folder)


def test_missing_h5py_is_reported_with_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "service.models.importers.programs.keras_weights", None)
    with pytest.raises(UnsupportedPackage, match=r"stackseg\[vendor\]"):
        stardist.read(folder)


@pytest.mark.skipif(find_spec("stardist") is not None, reason="stardist is installed")
def test_missing_stardist_is_reported_with_the_extra(folder, tmp_path):
    with pytest.raises(BrokenModel, match=r"stackseg\[stardist\]"):
        import_model(folder, tmp_path / "models", {})


@pytest.mark.skipif(find_spec("stardist") is None, reason="needs stardist")
def test_zip_archives_are_imported(folder, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "model"), "zip", folder.parent, folder.name)
    spec = import_model(Path(archive), tmp_path / "models", {"input": {"roi_size": (4, 16, 16)}}).spec
    assert spec.name == "my-model"
    assert "percentiles 1 and 99.8" in (spec.folder / "README.md").read_text()


@pytest.mark.parametrize("file", ["config.json", "thresholds.json"])
def test_documents_that_are_not_mappings_are_rejected(folder, file):
    (folder / file).write_text("[]")
    with pytest.raises(UnsupportedPackage, match="expected a mapping"):
        stardist.read(folder)
