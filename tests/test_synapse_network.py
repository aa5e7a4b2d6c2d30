"""Test of the example in docs/models.md: a network whose architecture exists only in Python code."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from importing import import_model
from paths import SHARED_DATA
from synapse_network import SynapseNetwork

from service.models.loader import load_network

FOLDER = SHARED_DATA / "models" / "seunglab_synapse"
SHAPE = (1, 1, 8, 64, 64)
KEYS = {
    "input": {"normalisation": {"kind": "range", "low": 0, "high": 255}, "roi_size": SHAPE[2:]},
    "outputs": ["synapse"],
    "activation": "sigmoid",
    "decoding": {"kind": "regions", "classes": [1], "threshold": 0.25},
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the weights are not in the repository")
def test_exported_network_finds_synapses(tmp_path: Path) -> None:
    network = SynapseNetwork().eval()
    state = torch.load(FOLDER / "mip1_d2_1175k.chkpt", map_location="cpu", weights_only=True)
    network.load_state_dict(state)
    sizes = {0: torch.export.Dim("batch")}
    program = torch.export.export(network, (torch.zeros(2, *SHAPE[1:]),), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "synapses.pt2")
    spec = import_model(tmp_path / "synapses.pt2", tmp_path / "models", KEYS).spec
    with h5py.File(FOLDER / "sample1_input.h5") as file:
        image = torch.from_numpy(file["main"][:].astype(np.float32) / 255)[None, None]
    with torch.inference_mode():
        # The synapse with the highest probability is in the middle of the window.
        z, y, x = np.unravel_index(int(network(image).argmax()), image.shape[2:])
        starts = [
            min(max(int(i) - n // 2, 0), length - n)
            for i, n, length in zip((z, y, x), SHAPE[2:], image.shape[2:], strict=True)
        ]
        box = tuple(slice(start, start + n) for start, n in zip(starts, SHAPE[2:], strict=True))
        window = image[(..., *box)]
        scores, expected_scores = load_network(spec)(window), network(window)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)
    assert scores.sigmoid().max() > 0.8
