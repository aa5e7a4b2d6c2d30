"""The tiny semantic model `bands`, and the phantoms that it segments.

`python tests/bands.py` retrains the model and writes its weights to `tests/data/bands.safetensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from service.models.architectures.build import build_network
from service.models.spec import Architecture

WEIGHTS = Path(__file__).parent / "data" / "bands.safetensors"

BANDS: dict[str, Any] = {
    "name": "bands",
    "version": "1",
    "summary": "Three intensity levels, for tests.",
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


class Phantom(NamedTuple):
    """A synthetic volume with spheres.

    image    uint16 [Z, Y, X]
    classes  uint8 [Z, Y, X]: 0 background, 1 dim sphere, 2 bright sphere
    """

    image: NDArray[np.uint16]
    classes: NDArray[np.uint8]


def make_phantom(shape: tuple[int, int, int], seed: int, spheres: int = 6) -> Phantom:
    """Draw spheres of intensity 1400 and 2400, `spheres` of each, on a background of 400 with Gaussian noise of 100."""
    rng = np.random.default_rng(seed)
    grid = np.ogrid[tuple(slice(edge) for edge in shape)]
    classes = np.zeros(shape, np.uint8)
    for value in (1, 2):
        for _ in range(spheres):
            center, radius = rng.uniform(0, 1, 3) * shape, rng.uniform(4, 9)
            classes[sum((axis - c) ** 2 for axis, c in zip(grid, center, strict=True)) < radius**2] = value
    image = 400 + 1000.0 * classes + rng.normal(0, 100, shape)
    return Phantom(image.clip(0, 65535).astype(np.uint16), classes)


def train_bands() -> nn.Module:
    """Train the network of `BANDS` to separate the three intensity levels of a phantom. This takes a few seconds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build_network(Architecture(**BANDS["architecture"])).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for step in range(80):
        phantoms = [make_phantom((16, 32, 32), 2 * step + item) for item in range(2)]
        images = torch.from_numpy(np.stack([p.image for p in phantoms])).float()[:, None] / 2800
        classes = torch.from_numpy(np.stack([p.classes for p in phantoms])).long()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), classes).backward()
        optimizer.step()
    return network.eval()


def load_bands() -> nn.Module:
    """Return the trained network: float [B, 1, z, y, x] with even edges -> scores [B, 3, z, y, x]."""
    network = build_network(Architecture(**BANDS["architecture"]))
    network.load_state_dict(load_file(WEIGHTS))
    return network.eval()


if __name__ == "__main__":
    save_file(train_bands().state_dict(), WEIGHTS)
