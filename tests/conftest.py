"""Fixtures that several test modules share: phantoms, and model repositories built in temporary folders."""

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
from safetensors.torch import save_file
from torch import nn

from service.__main__ import main
from service.models.architectures import build_network
from service.models.repository import read_spec
from service.models.spec import Architecture, ModelSpec

torch.set_num_threads(1)
# How long an example takes, or is drawn, is a matter of what else the machine does. The same ones are tried in every
# run, so that none fails by chance; `--hypothesis-profile=search` tries others.
ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("search", derandomize=False, **ANY_MACHINE)
hypothesis.settings.register_profile("any machine", derandomize=True, **ANY_MACHINE)
hypothesis.settings.load_profile("any machine")

WriteModel = Callable[..., ModelSpec]

RANDOM_NUCLEI: dict[str, Any] = {
    "name": "random-nuclei",
    "version": "1",
    "summary": "The bundled model's kind of network with random weights, for tests.",
    "licence": "Apache-2.0",
    "training_data": "None.",
    "architecture": {
        "name": "ShuffleUNet",
        "arguments": {"in_channels": 1, "out_channels": 2, "widths": [8, 12], "block": [2, 2, 2]},
    },
    "input": {"channels": 1, "normalisation": {"kind": "percentile"}, "roi_size": [16, 16, 16]},
    "outputs": ["foreground", "distance"],
    "activation": "none",
    "decoding": {"kind": "instances"},
}


def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds, or leaves, an engine plan, annotated stacks or models in the user's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


def write_model_folder(root: Path, content: dict[str, Any], network: nn.Module) -> ModelSpec:
    """Make `root/<name>` with a model file of this content and these weights, and read it back."""
    folder = root / content["name"]
    folder.mkdir(parents=True)
    weights = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, weights)
    stated = {"weights": {"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}}
    (folder / "model.yaml").write_text(yaml.safe_dump(content | stated, sort_keys=False), encoding="utf-8")
    return read_spec(folder)


@pytest.fixture(scope="session")
def bands_network() -> nn.Module:
    """Float [B, 1, z, y, x] with even edges -> scores [B, 3, z, y, x]; trained, in evaluation mode. Do not modify."""
    return load_bands()


@pytest.fixture(scope="session")
def bands_repository(tmp_path_factory: pytest.TempPathFactory, bands_network: nn.Module) -> Path:
    """A model repository with one deliberately tiny semantic model, `bands`."""
    root = tmp_path_factory.mktemp("bands-repository")
    write_model_folder(root, BANDS, bands_network)
    return root


@pytest.fixture(scope="session")
def bands(bands_repository: Path) -> ModelSpec:
    return read_spec(bands_repository / "bands")


@pytest.fixture(scope="session")
def random_nuclei(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A small instance model, foreground and distance, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build_network(Architecture(**RANDOM_NUCLEI["architecture"]))
    return write_model_folder(tmp_path_factory.mktemp("random-repository"), RANDOM_NUCLEI, network)


@pytest.fixture(scope="session")
def trainable(tmp_path_factory: pytest.TempPathFactory, random_nuclei: ModelSpec) -> ModelSpec:
    """`random_nuclei` as a model that a training can go on from."""
    folder = tmp_path_factory.mktemp("trainable") / random_nuclei.name
    return read_spec(copy_model(random_nuclei.folder, folder, activation="sigmoid"))


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """write_model(content, network=None) -> ModelSpec, in a repository of the test's own at `tmp_path / "models"`.

    `content` is the mapping of a model file without weights; without a network, one with random weights is built.
    """

    def write(content: dict[str, Any], network: nn.Module | None = None) -> ModelSpec:
        module = network if network is not None else build_network(Architecture(**content["architecture"]))
        return write_model_folder(tmp_path / "models", content, module)

    return write


@pytest.fixture(scope="session")
def phantom() -> Phantom:
    """A volume that `bands` has not seen, [24, 70, 80]: no edge is a multiple of the window's."""
    return make_phantom((24, 70, 80), seed=9999, spheres=10)


@pytest.fixture
def phantom_maker() -> Callable[..., Phantom]:
    """make_phantom(shape, seed, spheres=6)."""
    return make_phantom


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    """configure(repository, **sections) -> a configuration file: nothing is compiled, and one thread computes."""

    def write(repository: Path, **sections: Any) -> Path:
        chosen = {"models": {"folder": str(repository)}, "engine": {"kind": "eager"}}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(chosen | {"device": {"name": "cpu", "threads": 1}} | sections))
        return path

    return write


@pytest.fixture
def stackseg(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """stackseg(*arguments, status=0) -> what the command line says, on standard error where it fails as expected."""

    def run(*arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        told = capsys.readouterr()
        return told.err if status else told.out

    return run


@pytest.fixture
def bands_content() -> dict[str, Any]:
    """The mapping of the `bands` model file without weights, to vary: `content | {"name": ...}`."""
    return dict(BANDS)


@pytest.fixture
def random_nuclei_content() -> dict[str, Any]:
    return dict(RANDOM_NUCLEI)
