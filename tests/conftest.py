"""Shared fixtures: phantoms, and model repositories in temporary folders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import yaml
from bands import BANDS, Phantom, load_bands, make_phantom
from model_files import copy_model
from reader_processes import share_reader_processes
from safetensors.torch import save_file
from torch import nn

from service.__main__ import main
from service.models.architectures.build import build_network
from service.models.repository import read_spec
from service.models.spec import Architecture, ModelSpec

torch.set_num_threads(1)
# No deadlines: run times depend on the load of the machine. By default every run uses the same examples, so that no
# test fails by chance. `--hypothesis-profile=search` generates new ones.
HYPOTHESIS_SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("search", derandomize=False, **HYPOTHESIS_SETTINGS)
hypothesis.settings.register_profile("reproducible", derandomize=True, **HYPOTHESIS_SETTINGS)
hypothesis.settings.load_profile("reproducible")

WriteModel = Callable[..., ModelSpec]

RANDOM_NUCLEI: dict[str, Any] = {
    "name": "random-nuclei",
    "version": "1",
    "summary": "A small network of the bundled model's architecture with random weights, for tests.",
    "licence": "Apache-2.0",
    "training_data": "None.",
    "architecture": {
        "name": "ShuffleUNet",
        "arguments": {"in_channels": 1, "out_channels": 2, "widths": [8, 12], "block": [2, 2, 2]},
    },
    "input": {"channels": 1, "normalisation": {"kind": "percentile"}, "roi_size": [16, 16, 16]},
    "outputs": ["foreground", "distance"],
    "activation": {"foreground": "sigmoid", "distance": "none"},
    "decoding": {"kind": "instances"},
}


def pytest_runtest_setup() -> None:
    """Seed torch, so that the random numbers of a test do not depend on earlier tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _isolated_user_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests from reading or writing engine plans, annotated stacks, models and jobs in the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _shared_reader_processes() -> Iterator[None]:
    with share_reader_processes():
        yield


def write_model_folder(root: Path, content: dict[str, Any], network: nn.Module) -> ModelSpec:
    """Write `root/<name>` with this `model.yaml` content and the weights of `network`. Return the spec read from it."""
    folder = root / content["name"]
    folder.mkdir(parents=True)
    weights = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, weights)
    weights_entry = {"weights": {"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}}
    (folder / "model.yaml").write_text(yaml.safe_dump(content | weights_entry, sort_keys=False), encoding="utf-8")
    return read_spec(folder)


@pytest.fixture(scope="session")
def bands_network() -> nn.Module:
    """The trained network of `bands`, in evaluation mode: [B, 1, z, y, x] with even edges -> scores [B, 3, z, y, x].

    It is shared by the whole session. Do not modify it.
    """
    return load_bands()


@pytest.fixture(scope="session")
def bands_repository(tmp_path_factory: pytest.TempPathFactory, bands_network: nn.Module) -> Path:
    """A model repository with one tiny semantic model, `bands`."""
    root = tmp_path_factory.mktemp("bands-repository")
    write_model_folder(root, BANDS, bands_network)
    return root


@pytest.fixture(scope="session")
def bands(bands_repository: Path) -> ModelSpec:
    """The semantic model `bands`."""
    return read_spec(bands_repository / "bands")


@pytest.fixture(scope="session")
def random_nuclei(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A small instance model with foreground and distance outputs, and random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build_network(Architecture(**RANDOM_NUCLEI["architecture"]))
    return write_model_folder(tmp_path_factory.mktemp("random-repository"), RANDOM_NUCLEI, network)


@pytest.fixture(scope="session")
def trainable_model(tmp_path_factory: pytest.TempPathFactory, random_nuclei: ModelSpec) -> ModelSpec:
    """A copy of `random_nuclei` that can be the base model of a training."""
    folder = tmp_path_factory.mktemp("trainable") / random_nuclei.name
    return read_spec(copy_model(random_nuclei.folder, folder, activation="sigmoid"))


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """write_model(content, network=None) -> ModelSpec, written to the repository `tmp_path / "models"`.

    `content` is the content of `model.yaml` without `weights`. The default network has random weights.
    """

    def write(content: dict[str, Any], network: nn.Module | None = None) -> ModelSpec:
        module = network if network is not None else build_network(Architecture(**content["architecture"]))
        return write_model_folder(tmp_path / "models", content, module)

    return write


@pytest.fixture(scope="session")
def phantom() -> Phantom:
    """A volume [24, 70, 80] that `bands` was not trained on. No edge is a multiple of the window size."""
    return make_phantom((24, 70, 80), seed=9999, spheres=10)


@pytest.fixture
def phantom_maker() -> Callable[..., Phantom]:
    """make_phantom(shape, seed, spheres=6) -> Phantom."""
    return make_phantom


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """write_config(repository, **sections) -> path of a configuration file with the eager engine and one CPU thread."""

    def write(repository: Path, **sections: Any) -> Path:
        defaults = {"models": {"folder": str(repository)}, "engine": {"kind": "eager"}, "jobs": {"folder": "temporary"}}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(defaults | {"device": {"name": "cpu", "threads": 1}} | sections))
        return path

    return write


@pytest.fixture
def run_stackseg(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run_stackseg(*arguments, status=0) -> standard output of the command, or standard error if `status` is not 0."""

    def run(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


@pytest.fixture
def bands_content() -> dict[str, Any]:
    """The content of the `bands` model file without weights. Vary it with `content | {"name": ...}`."""
    return dict(BANDS)


@pytest.fixture
def random_nuclei_content() -> dict[str, Any]:
    """The content of the `random-nuclei` model file without weights."""
    return dict(RANDOM_NUCLEI)
