"""Fixtures that several test modules share: phantoms, and model repositories built in temporary folders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

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

BANDS: dict[str, Any] = {
    "name": "bands",
    "version": "1",
    "summary": "Three bands of brightness, for tests.",
    "licence": "Apache-2.0",
    "training_data": "Synthetic spheres.",
    "architecture": {
        "name": "UNet",
        "arguments": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 3,
            "channels": [8, 16],
            "strides": [2],
            "norm": "BATCH",
            "act": "RELU",
        },
    },
    "input": {
        "channels": 1,
        "channel_names": ["signal"],
        "normalisation": {"kind": "range", "low": 0.0, "high": 2800.0},
        "roi_size": [16, 32, 32],
    },
    "outputs": ["background", "dim", "bright"],
    "activation": "softmax",
    "decoding": {"kind": "classes"},
}

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


class Phantom(NamedTuple):
    """Spheres of three brightnesses: image uint16 [Z, Y, X] and its classes uint8 [Z, Y, X] of 0, 1, 2."""

    image: NDArray[np.uint16]
    classes: NDArray[np.uint8]


def make_phantom(shape: tuple[int, int, int], seed: int, spheres: int = 6) -> Phantom:
    """Two kinds of spheres, 1400 and 2400 bright on a background of 400, with noise of 100."""
    rng = np.random.default_rng(seed)
    grid = np.ogrid[tuple(slice(edge) for edge in shape)]
    classes = np.zeros(shape, np.uint8)
    for value in (1, 2):
        for _ in range(spheres):
            centre, radius = rng.uniform(0, 1, 3) * shape, rng.uniform(4, 9)
            classes[sum((axis - c) ** 2 for axis, c in zip(grid, centre, strict=True)) < radius**2] = value
    image = 400 + 1000.0 * classes + rng.normal(0, 100, shape)
    return Phantom(image.clip(0, 65535).astype(np.uint16), classes)


def write_model_folder(root: Path, content: dict[str, Any], network: nn.Module) -> ModelSpec:
    """Make `root/<name>` with a model file of this content and these weights, and read it back."""
    folder = root / content["name"]
    folder.mkdir(parents=True)
    weights = folder / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, weights)
    stated = {"weights": {"file": weights.name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}}
    (folder / "model.yaml").write_text(yaml.safe_dump(content | stated, sort_keys=False), encoding="utf-8")
    return read_spec(folder)


def train_bands() -> nn.Module:
    """The network of `BANDS` after a second of training: it tells the three brightnesses of a phantom apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build_network(Architecture(**BANDS["architecture"])).train()
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-2)
    for step in range(80):
        phantoms = [make_phantom((16, 32, 32), 2 * step + item) for item in range(2)]
        images = torch.from_numpy(np.stack([p.image for p in phantoms])).float()[:, None] / 2800
        classes = torch.from_numpy(np.stack([p.classes for p in phantoms])).long()
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images), classes).backward()
        optimiser.step()
    return network.eval()


@pytest.fixture(scope="session")
def bands_network() -> nn.Module:
    """Float [B, 1, z, y, x] with even edges -> scores [B, 3, z, y, x]; trained, in evaluation mode. Do not modify."""
    return train_bands()


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
def bands_content() -> dict[str, Any]:
    """The mapping of the `bands` model file without weights, to vary: `content | {"name": ...}`."""
    return dict(BANDS)


@pytest.fixture
def random_nuclei_content() -> dict[str, Any]:
    return dict(RANDOM_NUCLEI)
