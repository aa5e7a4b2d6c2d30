"""Tests that the output with the scores is found in networks that return several tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_export import export_onnx
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.models.graphs.onnx.network import load_onnx
from service.models.graphs.outputs import OutputQuery
from service.models.graphs.torch_export import load_torch_export
from service.models.graphs.torchscript import load_torchscript

WINDOW = (1, 16, 16, 16)
QUERY = OutputQuery(2)


class Arranged(nn.Module):
    """Return scores, their averages at two lower resolutions, and a classification, in some arrangement."""

    def __init__(self, arrange: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.head, self.classify, self._arrange = nn.Conv3d(1, 2, 1), nn.Linear(4, 3), arrange

    def forward(self, x: Tensor) -> Any:
        scores = self.head(x)
        half, quarter = (nn.functional.avg_pool3d(scores, factor) for factor in (2, 4))
        return self._arrange(scores, half, quarter, self.classify(quarter.mean((2, 3))))


ARRANGEMENTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "only": lambda scores, *_: scores,
    "first": lambda scores, half, quarter, _: (scores, half, quarter),
    "middle": lambda scores, half, quarter, _: [half, scores, quarter],
    "last": lambda scores, half, quarter, label: (label, quarter, half, scores),
    "dictionary": lambda scores, half, _quarter, label: {"label": label, "out": scores, "half": half},
    "nested": lambda scores, half, quarter, label: {"aux": (half, [quarter, label]), "main": [scores]},
}


def export(network: nn.Module, path: Path) -> Path:
    batch = torch.export.Dim("batch", min=1, max=64)
    images = torch.rand(2, *WINDOW)
    torch.export.save(torch.export.export(network.eval(), (images,), dynamic_shapes={"x": {0: batch}}), path)
    return path


def trace(network: nn.Module, path: Path) -> Path:
    torch.jit.trace(network.eval(), torch.rand(2, *WINDOW), strict=False).save(str(path))
    return path


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_scores_are_found_by_their_shape(arrangement: str, tmp_path: Path) -> None:
    network, images = Arranged(ARRANGEMENTS[arrangement]), torch.rand(3, *WINDOW)
    networks = [load_torch_export(export(network, tmp_path / "n.pt2"), WINDOW, QUERY)]
    if arrangement != "nested":
        networks.append(load_torchscript(trace(network, tmp_path / "n.ts"), WINDOW, QUERY))
        onnx_file = export_onnx(network, tmp_path / "n.onnx", (2, *WINDOW), {"x": {0: "batch"}})
        networks.append(load_onnx(onnx_file, WINDOW, QUERY))
    with torch.inference_mode():
        for loaded_network in networks:
            assert torch.allclose(loaded_network(images), network.head(images), atol=1e-5)


def test_output_is_chosen_by_name_if_several_have_the_same_shape(tmp_path: Path) -> None:
    network = Arranged(lambda scores, half, *_: {"aux": [half, -scores], "main": scores})
    file, images = export(network, tmp_path / "n.pt2"), torch.rand(3, *WINDOW)
    with pytest.raises(BrokenModel, match=r"'aux.0' \(1 x 2 x 8 .*'aux.1' .*'main' .*--output-tensor aux\.1$"):
        load_torch_export(file, WINDOW, QUERY)
    with torch.inference_mode():
        for name, sign in (("aux.1", -1), ("main", 1)):
            scores = load_torch_export(file, WINDOW, OutputQuery(2, name))(images)
            assert torch.allclose(scores, sign * network.head(images), atol=1e-5)
    with pytest.raises(BrokenModel, match=r"there is no output 'out'\. The outputs are 'aux\.0'"):
        load_torch_export(file, WINDOW, OutputQuery(2, "out"))


def test_all_outputs_are_listed_if_none_has_the_shape_of_the_scores(tmp_path: Path) -> None:
    network = Arranged(lambda _scores, half, quarter, _label: (half, quarter))
    for file, load in (
        (export(network, tmp_path / "n.pt2"), load_torch_export),
        (trace(network, tmp_path / "n.ts"), load_torchscript),
    ):
        with pytest.raises(BrokenModel, match=r"has 2 outputs: '0' \(1 x 2 x 8 x 8 x 8\), '1' .* None of them"):
            load(file, WINDOW, QUERY)


def test_outputs_that_require_another_window_size_are_ignored(tmp_path: Path) -> None:
    """The classification is possible only for the size of the exported example."""
    file = export(Arranged(lambda scores, _half, _quarter, label: (label, scores)), tmp_path / "n.pt2")
    assert load_torch_export(file, (1, 32, 32, 32), QUERY)(torch.rand(3, 1, 32, 32, 32)).shape == (3, 2, 32, 32, 32)
