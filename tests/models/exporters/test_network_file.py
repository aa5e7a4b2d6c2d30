"""Tests of writing networks to ONNX and torch.export files, for as many sizes as possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from service.core.errors import UnsupportedPackage
from service.models.architectures.build import build_network
from service.models.exporters import network_file
from service.models.exporters.network_file import Graph, GraphKind, write_network
from service.models.spec import Architecture

KINDS: tuple[GraphKind, ...] = ("onnx", "pt2")
KEYS: dict[str, Any] = {"name": "some"}


def make_graph(network: nn.Module, multiple: tuple[int, int, int] | None = (2, 2, 2)) -> Graph:
    return Graph(network.eval(), torch.rand(1, 1, 8, 8, 8), multiple, KEYS)


class FixedSize(nn.Module):
    """A network that contains the shape of its input as a constant. A batch size of -1 means any batch size."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.gain = batch_size, nn.Parameter(torch.rand(8, 8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.batch_size, 1, 8, 8, 8) * self.gain


class Unsupported(nn.Module):
    """A network with an operator that is not allowed in imported files."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_accept_all_sizes(tmp_path: Path, kind: GraphKind) -> None:
    result = write_network(make_graph(nn.Conv3d(1, 2, 3, padding=1)), tmp_path / f"x.{kind}", kind)
    assert result.flexibility == (True, (2, 2, 2))
    assert result.difference < 1e-5
    assert "sizes that are multiples of (2, 2, 2), in batches of any size" in result.flexibility.describe()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("network", "has_any_batch"), [(FixedSize(-1), True), (FixedSize(1), False)])
def test_constant_sizes_are_detected(tmp_path: Path, network: nn.Module, has_any_batch: bool, kind: GraphKind) -> None:
    result = write_network(make_graph(network), tmp_path / f"x.{kind}", kind)
    assert result.flexibility == (has_any_batch, None)


@pytest.mark.parametrize("kind", KINDS)
def test_window_may_be_as_small_as_its_multiple(tmp_path: Path, kind: GraphKind) -> None:
    network = nn.Conv3d(1, 2, 2, stride=2)
    result = write_network(make_graph(network, (8, 8, 8)), tmp_path / f"x.{kind}", kind)
    assert result.flexibility == (True, (8, 8, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_networks_that_cannot_be_exported_are_rejected(tmp_path: Path, kind: GraphKind) -> None:
    with pytest.raises(
        UnsupportedPackage, match=f"The network cannot be exported as {kind}: (the graph calls|.*Random)"
    ):
        write_network(make_graph(Unsupported()), tmp_path / f"x.{kind}", kind)


def test_different_scores_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_network = nn.Conv3d(1, 2, 3, padding=1)
    monkeypatch.setattr(network_file, "load_onnx", lambda *_: other_network)
    with pytest.raises(UnsupportedPackage, match="the scores of the file differ from those of the network by"):
        write_network(make_graph(nn.Conv3d(1, 2, 3, padding=1)), tmp_path / "x.onnx", "onnx")


def test_large_weights_are_not_written_as_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_file, "MAX_ONNX_WEIGHT_BYTES", 100)
    with pytest.raises(UnsupportedPackage, match="larger than 2 GiB"):
        write_network(make_graph(nn.Conv3d(1, 2, 3, padding=1)), tmp_path / "x.onnx", "onnx")


def test_onnx_file_is_valid_and_contains_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    write_network(make_graph(nn.Conv3d(1, 2, 3, padding=1)), path, "onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["image", "scores"]
    assert {entry.key: json.loads(entry.value) for entry in model.metadata_props} == {"stackseg": KEYS}


def test_torch_reads_the_exported_program(tmp_path: Path) -> None:
    path, network = tmp_path / "x.pt2", nn.Conv3d(1, 2, 3, padding=1)
    write_network(make_graph(network), path, "pt2")
    extra_files = {"stackseg.json": ""}
    program = torch.export.load(path, extra_files=extra_files)
    image = torch.rand(3, 1, 10, 12, 14)
    assert torch.equal(program.module()(image), network(image))
    assert json.loads(extra_files["stackseg.json"]) == KEYS


class MaskedWindows(nn.Module):
    """A network that numbers regions in a tensor of zeros, and looks up a gain for each, like SwinUNETR."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.rand(3, 2), requires_grad=False)
        self.register_buffer("index", torch.tensor([2, 0, 1, 2]))

    def forward(self, x: Tensor) -> Tensor:
        regions = torch.zeros((1, 1, *x.shape[2:]), device=x.device)
        for number, part in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            regions[:, :, part] = number
        return x * regions + self.gains[self.index].sum()


def test_tensors_created_from_shapes_are_supported(tmp_path: Path) -> None:
    result = write_network(make_graph(MaskedWindows()), tmp_path / "x.pt2", "pt2")
    assert result.flexibility.has_any_batch
    assert result.difference < 1e-6


@pytest.mark.thorough
def test_swin_unetr_is_written_as_pt2(tmp_path: Path) -> None:
    arguments = {"feature_size": 12, "depths": [2, 1, 1, 1], "num_heads": [1, 2, 3, 4], "window_size": 4}
    network = build_network(Architecture(name="SwinUNETR", arguments={"in_channels": 1, "out_channels": 2} | arguments))
    graph = Graph(network.eval(), torch.rand(1, 1, 64, 64, 64), None, KEYS)
    result = write_network(graph, tmp_path / "x.pt2", "pt2")
    assert result.flexibility.has_any_batch
    assert result.difference < 1e-4
