"""Tests of networks whose graphs contain the batch size of the example for which they were exported."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from onnx_export import export_onnx
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.graphs.batches import accept_any_batch
from service.models.graphs.onnx.network import load_onnx
from service.models.graphs.torch_export import load_torch_export
from service.models.graphs.torchscript import load_torchscript

WINDOW = (1, 8, 8, 8)


class Attention(nn.Module):
    """Self-attention over patches, whose exported reshapes contain the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix = nn.Conv3d(1, 8, 4, 4), nn.Linear(8, 24)
        self.up = nn.ConvTranspose3d(8, 2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x)
        batch, channels, *size = patches.shape
        tokens = self.mix(patches.flatten(2).transpose(1, 2)).reshape(int(batch), -1, 3, 8)
        queries, keys, values = tokens.unbind(2)
        mixed = torch.softmax(queries @ keys.transpose(1, 2), -1) @ values
        return self.up(mixed.transpose(1, 2).reshape(int(batch), channels, *size))


class Flattened(nn.Module):
    """A softmax over all voxels of all windows, recorded for one window: it runs for others, with wrong scores."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.reshape(1, -1), 1).reshape(-1, *WINDOW) * 100


class Dropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class TwoWindows(nn.Module):
    """Accept only two windows, and optionally average them."""

    def __init__(self, *, is_mixing: bool) -> None:
        super().__init__()
        self._is_mixing = is_mixing

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(2, *WINDOW)
        return x.mean(0, keepdim=True).expand(2, -1, -1, -1, -1) if self._is_mixing else 2 * x


# A TorchScript file does not declare its batch size, so only sizes of one and two are found.
@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [*itertools.product(["torch.export", "onnx"], [1, 2, 3]), ("torchscript", 1), ("torchscript", 2)],
)
def test_graph_for_a_fixed_batch_gives_the_scores_of_the_network_for_any_batch(
    kind: str, batch_size: int, tmp_path: Path
) -> None:
    network, images = Attention().eval(), torch.rand(5, *WINDOW)
    example = images[:batch_size]
    if kind == "torch.export":
        torch.export.save(torch.export.export(network, (example,)), tmp_path / "n.pt2")
        loaded_network = load_torch_export(tmp_path / "n.pt2", WINDOW)
    elif kind == "onnx":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            loaded_network = load_onnx(export_onnx(network, tmp_path / "n.onnx", tuple(example.shape)), WINDOW)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(network, example).save(str(tmp_path / "n.ts"))
        loaded_network = load_torchscript(tmp_path / "n.ts", WINDOW)
    with torch.inference_mode():
        expected = network(images)
        for count in (1, 2, 5):
            assert torch.allclose(loaded_network(images[:count]), expected[:count], atol=1e-5)


def test_network_that_mixes_the_windows_of_a_batch_processes_one_window_at_a_time() -> None:
    network, images = Flattened(), torch.rand(3, *WINDOW)
    assert not torch.allclose(network(images)[:1], network(images[:1]))
    scores = accept_any_batch(network, WINDOW)(images)
    assert torch.equal(scores, torch.cat([network(image[None]) for image in images]))


def test_network_that_accepts_any_batch_is_returned_unchanged() -> None:
    network = nn.Conv3d(1, 2, 3)
    assert accept_any_batch(network, WINDOW, 1) is network


def test_network_with_random_scores_is_rejected() -> None:
    with pytest.raises(BrokenModel, match="different scores for the same window"):
        accept_any_batch(Dropout(), WINDOW)


def test_batches_of_two_windows_are_filled_unless_they_are_mixed() -> None:
    images = torch.rand(3, *WINDOW)
    assert torch.equal(accept_any_batch(TwoWindows(is_mixing=False), WINDOW)(images), 2 * images)
    with pytest.raises(BrokenModel, match="accepts only batches of 2 windows, and the scores of a window depend on"):
        accept_any_batch(TwoWindows(is_mixing=True), WINDOW)
