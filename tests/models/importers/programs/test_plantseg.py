"""Tests of importing PlantSeg's checkpoints, compared with the probabilities that PanSeg computed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from importing import import_model
from paths import ROOT, SHARED_DATA
from segmenters import make_settings

from service.core.errors import BrokenModel, MissingKeys, ModelError, UnsupportedPackage
from service.core.types import Options, Volume
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.architectures.build import build_network
from service.models.importers.programs import plantseg
from service.models.spec import Architecture, ModelSpec

DATA = ROOT / "tests" / "data" / "plantseg"
MODELS = ("panseg_bcr", "unet_gcr", "residual_cge")
AUTHENTIC_CHECKPOINT = SHARED_DATA / "models" / "panseg_unet3d" / "best_checkpoint.pytorch"


@pytest.fixture(autouse=True)
def _require_library(request: pytest.FixtureRequest) -> None:
    if "without_library" not in request.node.name:
        pytest.importorskip("bioimage_cpp", reason="requires the extra boundaries")


def copy_package(name: str, folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    """Copy a package, and change its configuration."""
    shutil.copytree(DATA / name, folder)
    if change is not None:
        config = yaml.safe_load((folder / "config_train.yml").read_text())
        change(config)
        (folder / "config_train.yml").write_text(yaml.safe_dump(config))
    return folder


def compute(spec: ModelSpec, stack: Any, **options: Any) -> Any:
    return segment(ModelRunner(spec, make_settings()), Volume.from_array(stack[None]), Options(**options)).segmentation


@pytest.mark.parametrize("name", MODELS)
def test_imported_checkpoint_gives_the_probabilities_of_the_original(name: str, tmp_path: Path) -> None:
    spec, _ = import_model(DATA / name, tmp_path, {})
    with np.load(DATA / name / "sample.npz") as sample:
        stack, expected = sample["stack"], sample["probabilities"] / 65535
    assert spec.name == name
    assert spec.input.roi_size == stack.shape
    assert expected.std() > 0.1
    assert np.abs(compute(spec, stack, output="probabilities").pixels - expected).max() < 1e-4
    labels = compute(spec, stack)
    assert labels.kind == "labels"
    assert labels.count > 5


def test_checkpoint_file_without_configuration_asks_for_what_tensors_do_not_determine(tmp_path: Path) -> None:
    package = copy_package("unet_gcr", tmp_path / "package")
    (package / "config_train.yml").unlink()
    with pytest.raises(MissingKeys) as caught:
        import_model(package / "last_checkpoint.pytorch", tmp_path / "models", {})
    assert set(caught.value.problems) == {"architecture", "input.normalisation", "input.roi_size"}
    message = caught.value.package
    assert "'UNet3D(in_channels=1, out_channels=1, f_maps=[6, 12, 24], layer_order=\"gcr\")'" in message
    assert "(gcr, gcl, gce) or num_groups" in message
    arguments = {"in_channels": 1, "out_channels": 1, "f_maps": [6, 12, 24], "num_groups": 3}
    stated = {
        "architecture": {"name": "UNet3D", "arguments": arguments},
        "input": {"normalisation": {"kind": "zscore"}, "roi_size": [16, 64, 64]},
    }
    spec, notes = import_model(package / "last_checkpoint.pytorch", tmp_path / "models", stated)
    assert spec.decoding.kind == "boundaries"
    assert any("assumed to be the probability of a boundary" in note for note in notes)
    with np.load(package / "sample.npz") as sample:
        found = compute(spec, sample["stack"], output="probabilities").pixels
        assert np.abs(found - sample["probabilities"] / 65535).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "arguments", "orders"),
    [
        ("UNet3D", {"layer_order": "gcr"}, ["gcr", "gcl", "gce"]),
        ("UNet3D", {"layer_order": "cl", "conv_upscale": 1}, ["cr", "cl", "ce"]),
        ("UNet3D", {"layer_order": "cbe", "upsample": "deconv"}, ["crb", "cbr", "clb", "cbl", "ceb", "cbe"]),
        ("ResidualUNet3D", {"layer_order": "bcr"}, ["bcr", "bcl", "bce"]),
        ("ResidualUNetSE3D", {"layer_order": "cge"}, ["crg", "cgr", "clg", "cgl", "ceg", "cge"]),
    ],
)
def test_arguments_are_inferred_from_tensors_without_library(
    name: str, arguments: dict[str, Any], orders: list[str]
) -> None:
    sizes = {"in_channels": 2, "out_channels": 3, "f_maps": [8, 16, 32]}
    tensors = build_network(Architecture(name=name, arguments=sizes | arguments)).state_dict()
    expected = sizes | {key: value for key, value in arguments.items() if key != "layer_order"}
    assert plantseg.infer_network(tensors) == (name, expected, orders)


def test_tensors_of_other_networks_are_not_inferred_without_library() -> None:
    assert plantseg.infer_network({"conv.weight": torch.ones(1, 1, 3, 3, 3)}) is None
    tensors = {
        "encoders.0.basic_module.SingleConv2.conv.weight": torch.ones(()),
        "final_conv.weight": torch.ones(1, 2),
    }
    assert plantseg.infer_network(tensors) is None


def set_model(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["model"].update(keys)


def set_loader(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["loaders"]["val"].update(keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_model(name="UNet2D"), r"model\.name: 'UNet2D': 2D networks are not supported"),
        (set_model(name="os.system"), r"model\.name: 'os\.system': it is not one of UNet3D"),
        (set_model(in_channels="all"), r"model\.in_channels: expected a number"),
        (set_model(in_channels=10**9), r"model\.in_channels: found 1000000000 channels"),
        (set_model(f_maps=10**9), "f_maps must contain numbers"),
        (set_model(num_levels=10**12), "num_levels must be from 2"),
        (set_model(f_maps=[6, 12]), "The weights do not fit UNet3D"),
        (set_model(layer_order="bcr"), "The weights do not fit UNet3D"),
        (set_model(layer_order=["g", "c"]), "layer_order must be"),
        (set_model(conv_padding=0), r"model\.conv_padding: only a padding of 1"),
        (set_model(is_segmentation=False), r"model\.is_segmentation: the network was trained for regression"),
        (set_model(final_sigmoid=False), r"activation"),
        (set_loader(slice_builder={"patch_shape": [1, 2]}), r"val\.slice_builder\.patch_shape: expected three"),
        (set_loader(slice_builder={"patch_shape": [10**6, 10**6, 10**6]}), r"is too large"),
        (set_loader(slice_builder=[]), r"roi_size"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(change: Any, message: str, tmp_path: Path) -> None:
    package = copy_package("unet_gcr", tmp_path / "package", change)
    with pytest.raises(ModelError) as caught:
        import_model(package, tmp_path / "models", {})
    problems = caught.value.problems if isinstance(caught.value, MissingKeys) else {}
    text = " ".join([str(caught.value), *(f"{key}: {problem}" for key, problem in problems.items())])
    assert re.search(message, text), text
    assert not list((tmp_path / "models").glob("*/model.yaml"))


def test_malicious_pickles_and_configurations_are_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trap,)

    package = copy_package("unet_gcr", tmp_path / "pickle")
    torch.save({"model_state_dict": Trap()}, package / "last_checkpoint.pytorch")
    with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
        import_model(package, tmp_path / "models", {})
    for number, text in enumerate(
        (
            f"model: !!python/object/apply:pathlib.Path.touch [{trap}]",
            f"model: !!python/tuple [!!python/object/apply:os.system ['touch {trap}']]",
            "model: [",
            "- model",
            "model: {name: UNet3D, in_channels: 1, out_channels: 1, f_maps: {}}",
        )
    ):
        package = copy_package("unet_gcr", tmp_path / f"yaml{number}")
        (package / "config_train.yml").write_text(text)
        with pytest.raises(ModelError):
            import_model(package, tmp_path / "models", {})
    assert not trap.exists()


def test_arguments_that_the_original_ignores_are_reported_in_a_note(tmp_path: Path) -> None:
    change = set_model(**{"pool_kernel_size": 3, "a\x1b[2Jb": 1})
    _, notes = import_model(copy_package("unet_gcr", tmp_path / "package", change), tmp_path / "models", {})
    assert "The argument 'pool_kernel_size' is ignored, as by the original network." in notes
    assert not any("\x1b" in note for note in notes)


def test_networks_of_old_versions_are_rejected_by_name(tmp_path: Path) -> None:
    package = copy_package("residual_cge", tmp_path / "package")
    path = package / "last_checkpoint.pytorch"
    tensors = torch.load(path, weights_only=False)["model_state_dict"]
    renamed = {name.replace(".conv_transposed", ""): tensor for name, tensor in tensors.items()}
    torch.save(renamed, path)
    with pytest.raises(UnsupportedPackage, match=r"upsampling\.upsample\.weight.*before 1\.8\.3"):
        import_model(package, tmp_path / "models", {})


def test_missing_library_is_named_without_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.models.loader.find_spec", lambda _name: None)
    with pytest.raises(BrokenModel, match=r"pip install 'stackseg\[boundaries\]'"):
        import_model(DATA / "unet_gcr", tmp_path, {})


@pytest.mark.skipif(not AUTHENTIC_CHECKPOINT.is_file(), reason="requires shared/data next to the clone")
def test_authentic_checkpoint_is_imported(tmp_path: Path) -> None:
    architecture = {"name": "UNet3D", "arguments": {"in_channels": 1, "out_channels": 1, "f_maps": 16}}
    inputs = {"normalisation": {"kind": "zscore"}, "roi_size": [16, 32, 32]}
    spec, _ = import_model(AUTHENTIC_CHECKPOINT, tmp_path, {"architecture": architecture, "input": inputs})
    assert spec.name == "panseg_unet3d"
    assert spec.decoding.kind == "boundaries"
