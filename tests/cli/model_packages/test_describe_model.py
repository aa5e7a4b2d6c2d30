"""Tests of the description of an imported model."""

from importing import import_model
from paths import ROOT

from service.cli.model_packages.describe_model import describe_model
from service.models.repository import read_spec

DATA = ROOT / "tests" / "data"


def test_imported_model_is_described_completely(tmp_path):
    spec, notes = import_model(DATA / "cellpose" / "CP_synthetic", tmp_path, {})
    assert list(describe_model(spec)) == [
        "channels: 1",
        "normalization: percentiles 1 and 99",
        f"resampling: to objects of 17 voxels, by the diameter in the request (default: {spec.input.default_diameter})",
        "windows: 4x224x224 voxels",
        "outputs: object, flow z, flow y, flow x",
        "results: flows, background, object",
    ]
    assert notes[0] == "The package was read as a model of Cellpose."


def test_bundled_models_are_described():
    assert list(describe_model(read_spec(ROOT / "models" / "tissue")))[-1].endswith(
        "classes, background, cell, membrane"
    )
    nuclei = list(describe_model(read_spec(ROOT / "models" / "nuclei")))
    assert nuclei[0] == "channels: 1 (nuclei)"
    assert nuclei[2] == "resampling: to objects of 20 voxels, by the diameter in the request (default: an estimate)"
