"""Tests of importing bioimage.io packages, which `bioimageio.spec` validates first."""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from bioimageio.spec import InvalidDescr, ValidationContext, build_description
from importing import import_model, segment_volume
from onnx_export import export_onnx
from torch import nn

from service.core.errors import BrokenModel, UnsupportedPackage
from service.core.types import Volume
from service.models.importers import bioimageio
from service.models.repository import PICTURE_FILE
from service.models.spec import Citation

NETWORK = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 3,
    "channels": [8, 16],
    "strides": [2],
    "norm": "BATCH",
    "act": "RELU",
}
SHAPE = (1, 1, 16, 32, 32)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_axes(channels: list[str], reference: str | None = None) -> list[dict[str, Any]]:
    sizes = [{"min": edge, "step": 2} for edge in SHAPE[2:]]
    if reference is not None:
        sizes = [{"tensor_id": reference, "axis_id": letter} for letter in "zyx"]
    spaces = [{"type": "space", "id": letter, "size": size} for letter, size in zip("zyx", sizes, strict=True)]
    return [{"type": "batch"}, {"type": "channel", "channel_names": channels}, *spaces]


def write_common_files(folder: Path, network: nn.Module, image: np.ndarray) -> dict[str, Any]:
    """Write the files of a package, and return the part of its description that both format versions share."""
    folder.mkdir()
    np.save(folder / "input.npy", image[None, None].astype(np.float32))
    scaled_image = torch.from_numpy((image[None, None].astype(np.float32) - 400) / 2000)
    with torch.inference_mode():
        np.save(folder / "output.npy", torch.softmax(network(scaled_image), 1).numpy())
    torch.save(network.state_dict(), folder / "weights.pt")
    torch.jit.script(network).save(str(folder / "weights.ts"))
    (folder / "README.md").write_text("# Bands\n\nA model for tests. ## Validation\n\nNone.\n")
    (folder / "cover.png").write_bytes(PNG)
    return {
        "type": "model",
        "name": "Bands of Brightness",
        "description": "Three bands of brightness.",
        "authors": [{"name": "A. Tester", "affiliation": "Nowhere"}],
        "maintainers": [{"github_user": "nobody"}],
        "cite": [{"text": "None", "doi": "10.1234/fake"}],
        "license": "CC0-1.0",
        "tags": ["3d"],
        "covers": ["cover.png"],
        "documentation": "README.md",
    }


def write_05(folder: Path, network: nn.Module, image: np.ndarray) -> Path:
    description = write_common_files(folder, network, image) | {"format_version": "0.5.4"}
    tensors = {name: {"source": name, "sha256": digest(folder / name)} for name in ("input.npy", "output.npy")}
    scale = {"id": "scale_linear", "kwargs": {"gain": 1 / 2000, "offset": -0.2}}
    names = ["background", "dim", "bright"]
    softmax = {"id": "softmax", "kwargs": {"axis": "channel"}}
    library = {"callable": "UNet", "import_from": "monai.networks.nets", "kwargs": NETWORK}
    description |= {
        "inputs": [
            {"id": "raw", "axes": make_axes(["signal"]), "test_tensor": tensors["input.npy"], "preprocessing": [scale]}
        ],
        "outputs": [
            {
                "id": "pred",
                "axes": make_axes(names, "raw"),
                "test_tensor": tensors["output.npy"],
                "postprocessing": [softmax],
            }
        ],
        "weights": {
            "pytorch_state_dict": {
                "source": "weights.pt",
                "sha256": digest(folder / "weights.pt"),
                "architecture": library,
                "pytorch_version": "2.8.0",
            }
        },
    }
    return write_description(folder, description)


def write_04(folder: Path, network: nn.Module, image: np.ndarray) -> Path:
    description = write_common_files(folder, network, image) | {"format_version": "0.4.10"}
    scale = {"name": "scale_linear", "kwargs": {"gain": 1 / 2000, "offset": -0.2, "axes": "zyx"}}
    description |= {
        "timestamp": "2026-01-01T00:00:00",
        "inputs": [
            {
                "name": "raw",
                "axes": "bczyx",
                "data_type": "float32",
                "shape": {"min": list(SHAPE), "step": [0, 0, 2, 2, 2]},
                "preprocessing": [scale],
            }
        ],
        "outputs": [
            {
                "name": "pred",
                "axes": "bczyx",
                "data_type": "float32",
                "shape": {"reference_tensor": "raw", "scale": [1, 0, 1, 1, 1], "offset": [0, 1.5, 0, 0, 0]},
            }
        ],
        "test_inputs": ["input.npy"],
        "test_outputs": ["output.npy"],
        "weights": {"torchscript": {"source": "weights.ts", "sha256": digest(folder / "weights.ts")}},
    }
    with torch.inference_mode():
        scores = network(torch.from_numpy((np.load(folder / "input.npy") - 400) / 2000))
    np.save(folder / "output.npy", scores.numpy())
    return write_description(folder, description)


def write_description(folder: Path, description: dict[str, Any]) -> Path:
    path = folder / "rdf.yaml"
    path.write_text(yaml.safe_dump(description, sort_keys=False))
    return folder


def assert_is_valid(folder: Path) -> None:
    with ValidationContext(root=folder, perform_io_checks=False):
        description = build_description(yaml.safe_load((folder / "rdf.yaml").read_text()))
    assert not isinstance(description, InvalidDescr), description.validation_summary.format()


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


@pytest.fixture
def image(phantom: Any) -> np.ndarray:
    return phantom.image[:16, :32, :32]


@pytest.fixture
def package(bands_network: nn.Module, tmp_path: Path, image: np.ndarray) -> Path:
    """A package in format 0.5 with a state dict."""
    return write_05(tmp_path / "package", bands_network, image)


def make_weights(kind: str, **entry: Any) -> dict[str, Any]:
    return {"weights": {kind: entry}}


def change_description(package: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    description = yaml.safe_load((package / "rdf.yaml").read_text())
    change(description)
    return write_description(package, description)


@pytest.mark.parametrize("write", [write_05, write_04])
def test_package_is_imported_and_checked_with_its_own_tests(
    bands_network: nn.Module, tmp_path: Path, phantom: Any, image: np.ndarray, write: Any
) -> None:
    folder = write(tmp_path / "package", bands_network, image)
    assert_is_valid(folder)
    # The package in format 0.4 contains logits of outputs without names.
    overrides = {"decoding": {"kind": "classes"}} if write is write_04 else {}
    spec, notes = import_model(folder, tmp_path / "models", overrides, trust=write is write_04)
    assert (spec.name, spec.licence) == ("bands-of-brightness", "CC0-1.0")
    assert (spec.authors, spec.cite) == (("A. Tester",), (Citation(text="None", doi="10.1234/fake"),))
    assert (spec.folder / PICTURE_FILE).read_bytes() == PNG
    assert any("was reproduced with" in note for note in notes)
    result = segment_volume(spec, Volume.from_array(phantom.image[None])).segmentation
    # The network was trained with a different normalization, so the labels are not compared with the true classes.
    assert set(np.unique(result.pixels)) == {0, 1, 2}
    assert result.pixels.shape == phantom.image.shape


@pytest.mark.parametrize("is_external", [False, True])
def test_package_with_onnx_weights_is_imported(
    bands_network: nn.Module, package: Path, tmp_path: Path, phantom: Any, is_external: bool
) -> None:
    reference_spec = import_model(package, tmp_path / "models", {}, "reference").spec
    path = export_onnx(bands_network, package / "weights.onnx", SHAPE, {"x": {0: "b", 2: "z", 3: "y", 4: "w"}})
    external = dict[str, Any]()
    if is_external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.data", size_threshold=0)
        external["external_data"] = {"source": "weights.data", "sha256": digest(package / "weights.data")}
    entry = make_weights("onnx", source=path.name, sha256=digest(path), opset_version=20, **external)
    spec, notes = import_model(
        change_description(package, lambda overrides: overrides.update(entry)), tmp_path / "models", {}
    )
    assert (spec.weights.kind, spec.weights.file, spec.architecture) == ("onnx", "weights.onnx", None)
    assert any("was reproduced with" in note for note in notes)
    volume = Volume.from_array(phantom.image[None])
    result, expected = (segment_volume(model, volume).segmentation.pixels for model in (spec, reference_spec))
    assert np.mean(result == expected) > 0.9999


def test_halos_and_pixel_sizes_that_are_not_used_are_noted(
    bands_network: nn.Module, tmp_path: Path, image: np.ndarray
) -> None:
    def add_halo(rdf: dict[str, Any]) -> None:
        rdf["outputs"][0]["halo"] = [0, 0, 2, 4, 4]

    def add_pixel_sizes(rdf: dict[str, Any]) -> None:
        for tensor in (*rdf["inputs"], *rdf["outputs"]):
            for axis, size in zip(tensor["axes"][2:], (0.5, 0.2, 0.2), strict=True):
                axis |= {"scale": size, "unit": "micrometer"}

    def add_halo_to_axes(rdf: dict[str, Any]) -> None:
        for axis, halo in zip(rdf["outputs"][0]["axes"][2:], (2, 4, 4), strict=True):
            axis["halo"] = halo

    old = change_description(write_04(tmp_path / "old", bands_network, image), add_halo)
    new = change_description(write_05(tmp_path / "new", bands_network, image), add_pixel_sizes)
    new_with_halo = change_description(write_05(tmp_path / "halo", bands_network, image), add_halo_to_axes)
    for folder in (old, new, new_with_halo):
        assert_is_valid(folder)

    for folder in (old, new_with_halo):
        assert any("a halo of [0, 0, 2, 4, 4] pixels" in note for note in bioimageio.read(folder).notes)
    sizes = "0.5 micrometer, 0.2 micrometer, 0.2 micrometer along z, y and x"
    assert any(f"a pixel size of {sizes}, which is not used" in note for note in bioimageio.read(new).notes)


def test_output_that_is_smaller_than_the_input_is_rejected(package: Path) -> None:
    change_description(package, lambda rdf: rdf["outputs"][0]["axes"][4]["size"].update(offset=-8))
    with pytest.raises(UnsupportedPackage, match=r"outputs\[0\]\.axes\[4\]\.size: the output must have the size"):
        bioimageio.read(package)


def test_odd_credits_and_covers_do_not_prevent_an_import(package: Path, tmp_path: Path) -> None:
    authors = [{"name": "A\nTester"}, {"affiliation": "Nowhere"}, "B. Tester", 3.5, {"name": ["C"]}]
    cite = [{"text": "One", "doi": "https://doi.org/10.1234/one", "url": "javascript:alert(1)"}, {"doi": "none"}, None]
    odd = {
        "authors": authors,
        "cite": cite,
        "covers": ["../../secret.png", "https://example.org/a.png", "README.md", 7],
    }
    spec = import_model(change_description(package, lambda rdf: rdf.update(odd)), tmp_path / "models", {}).spec
    assert spec.authors == ("A Tester", "B. Tester", "3.5")
    assert spec.cite == (Citation(text="One", doi="10.1234/one"), Citation(text="none"))
    assert not (spec.folder / PICTURE_FILE).exists()


def test_zipped_package_is_imported_like_a_folder(package: Path, tmp_path: Path) -> None:
    archive = Path(shutil.make_archive(str(package), "zip", package))
    spec = import_model(archive, tmp_path / "models", {}).spec
    assert spec.outputs == ("background", "dim", "bright")
    assert spec.input.roi_size == (64, 64, 64)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (make_weights("keras_hdf5", source="weights.h5"), "weights: found keras_hdf5"),
        ({"format_version": "0.3.6"}, r"format_version: .*0\.3\.6"),
        ({"inputs": []}, "inputs: found 0 tensors"),
        (
            make_weights(
                "pytorch_state_dict", source="weights.pt", architecture={"callable": "Net", "source": "net.py"}
            ),
            "weights.pytorch_state_dict.architecture",
        ),
        (make_weights("torchscript", source="../weights.ts"), "not a file inside the package"),
        (make_weights("torchscript", source="https://example.org/weights.ts"), "not a file inside the package"),
        (make_weights("torchscript", source="weights.ts", sha256="0" * 64), "weights.torchscript.sha256"),
        (make_weights("torchscript", source="weights.ts\0"), "The description in .* is inconsistent"),
        (make_weights("torchscript", source="/etc/passwd"), "not a file inside the package"),
        ({"inputs": [{"axes": 5}]}, "inputs"),
        ({"inputs": [{"axes": "bczyx", "shape": 7}]}, "inputs"),
        ({"inputs": [{"axes": "bczyx", "shape": [1, 10**9, 8, 8, 8]}]}, "1000000000 channels"),
        ({"inputs": [{"axes": "bczyx", "shape": {"min": 1, "step": "x"}}]}, "The description in .* is inconsistent"),
    ],
)
def test_unsupported_packages_are_rejected_with_the_field(
    package: Path, tmp_path: Path, overrides: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedPackage, match=field):
        import_model(
            change_description(package, lambda description: description.update(overrides)), tmp_path / "models", {}
        )


@pytest.mark.parametrize(
    ("side", "chain", "step", "field"),
    [
        ("inputs", "preprocessing", {"id": "binarize"}, r"inputs\[0\].preprocessing\[0\]"),
        (
            "inputs",
            "preprocessing",
            {"id": "zero_mean_unit_variance", "kwargs": {"axes": ["channel"]}},
            r"preprocessing\[0\].kwargs.axes",
        ),
        ("outputs", "postprocessing", {"id": "cellpose_flow_dynamics"}, r"outputs\[0\].postprocessing"),
    ],
)
def test_unsupported_processing_is_rejected_with_the_field(
    package: Path, tmp_path: Path, side: str, chain: str, step: dict[str, Any], field: str
) -> None:
    change_description(package, lambda description: description[side][0].update({chain: [step]}))
    with pytest.raises(UnsupportedPackage, match=field):
        import_model(package, tmp_path / "models", {})


def write_huge_shape(path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 100000, 100000, 1000), }".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)


def write_several_arrays(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, np.ones(SHAPE))


def write_pickled_array(path: Path) -> None:
    np.save(path, np.array([[[[[{}]]]]], object), allow_pickle=True)


def replace_with_link(path: Path) -> None:
    path.rename(path.parent.parent / "outside.npy")
    path.symlink_to(path.parent.parent / "outside.npy")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    "damage", [write_huge_shape, write_several_arrays, write_pickled_array, replace_with_link, truncate]
)
def test_invalid_test_tensors_are_rejected(package: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(package / "input.npy")
    change_description(package, lambda description: description["inputs"][0]["test_tensor"].pop("sha256"))
    with pytest.raises(
        UnsupportedPackage, match=r"input\.npy( cannot be read|: expected a numeric array| is not a file)"
    ):
        import_model(package, tmp_path / "models", {})


@pytest.mark.parametrize(
    ("name", "ending", "is_accepted"),
    [
        ("foreground", "sigmoid", False),
        ("foreground", "logits", False),
        ("foreground", "softmax", True),
        ("Background", "logits", True),
        ("background", "sigmoid", True),
    ],
)
def test_outputs_without_activation_are_classes_only_if_they_exclude_each_other(
    package: Path, tmp_path: Path, name: str, ending: str, is_accepted: bool
) -> None:
    """Many networks for nuclei and cells return a foreground and a boundary, after a sigmoid in the network."""
    scores = torch.randn(1, 3, *SHAPE[2:], generator=torch.Generator().manual_seed(0))
    scores = {"sigmoid": torch.sigmoid(scores), "softmax": torch.softmax(scores, 1), "logits": scores}[ending]
    np.save(package / "output.npy", scores.numpy())

    def remove_activation(rdf: dict[str, Any]) -> None:
        output = rdf["outputs"][0]
        output["axes"][1]["channel_names"] = [name, "boundary", "other"]
        output["test_tensor"].pop("sha256")
        del output["postprocessing"]

    draft = bioimageio.read(change_description(package, remove_activation))
    if is_accepted:
        assert draft.content["decoding"] == {"kind": "classes"}
    else:
        assert "foreground, boundary, other, are classes" in draft.problems["decoding"]


def test_error_of_a_small_output_is_not_hidden_by_a_large_one(
    bands_network: nn.Module, tmp_path: Path, image: np.ndarray
) -> None:
    """The test of a package has a tolerance for each output, because distances can be far larger than 1."""
    network = copy.deepcopy(bands_network)
    weight, bias = list(network.parameters())[-2:]
    with torch.no_grad():
        weight[:, 2] *= 1e5
        bias[2] *= 1e5
    folder = write_04(tmp_path / "package", network, image)
    overrides = {"decoding": {"kind": "classes"}, "outputs": ["one", "two", "far"]}
    import_model(folder, tmp_path / "models", overrides, "exact", trust=True)
    expected = np.load(folder / "output.npy")
    expected[:, 1] += 0.5
    np.save(folder / "output.npy", expected)
    with pytest.raises(BrokenModel, match=r"the output 'two' differs from the package's expected output by 0\.5"):
        import_model(folder, tmp_path / "models", overrides, "inexact", trust=True)


def test_package_whose_test_is_not_reproduced_is_rejected(package: Path, tmp_path: Path) -> None:
    overrides = {"input": {"normalisation": {"kind": "zscore"}}}
    with pytest.raises(BrokenModel, match="the output 'background' differs from the package's expected output"):
        import_model(package, tmp_path / "models", overrides)
    assert list((tmp_path / "models").iterdir()) == []
