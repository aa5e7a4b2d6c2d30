"""Tests of MONAI's networks, and of hiding optional packages while MONAI is imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from einops.layers.torch import Rearrange
from models.architectures.test_build import ARGUMENTS
from monai.networks import nets
from monai.networks.blocks import patchembedding, selfattention
from monai.networks.nets.basic_unet import BasicUNet

from service.models.architectures import monai as monai_architectures
from service.models.architectures.build import build_network
from service.models.spec import Architecture


@pytest.mark.parametrize("edges", [(32, 32, 32), (33, 36, 34)])
def test_basic_unet_matches_monais_and_compiles_to_one_graph(edges):
    arguments = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "features": [8] * 6}
    original = BasicUNet(**arguments).eval()
    network = build_network(Architecture(name="BasicUNet", arguments=arguments)).eval()
    network.load_state_dict(original.state_dict())
    x = torch.rand(1, 1, *edges)
    graph = torch.compile(network, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(graph(x), original(x))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("AttentionUnet", {}),
        ("VNet", {}),
        ("SegResNetDS", {}),
        ("MedNeXt", {}),
        ("SwinUNETR", {}),
        ("UNETR", {"img_size": [32, 32, 64]}),
        ("UNETR", {"img_size": [32, 32, 64], "proj_type": "perceptron", "qkv_bias": True}),
        ("FlexibleUNet", {}),
        ("FlexibleUNet", {"backbone": "efficientnet-b0", "is_pad": False}),
    ],
)
def test_network_matches_monais(name: str, changes: dict[str, Any]) -> None:
    arguments = ARGUMENTS[name] | changes
    options = {"pretrained": False} if name == "FlexibleUNet" else {}
    # The service replaces the rearrangements of einops, which this test compares with the originals.
    with pytest.MonkeyPatch.context() as patch:
        for module in (patchembedding, selfattention):
            patch.setattr(module, "Rearrange", Rearrange)
        original = getattr(nets, name)(**arguments, **options).eval()
    network = build_network(Architecture(name=name, arguments=arguments)).eval()
    network.load_state_dict(original.state_dict())
    x = torch.rand(1, 2, 32, 32, 64)
    with torch.inference_mode():
        assert torch.allclose(network(x), original(x), atol=1e-5)


def test_attention_is_not_stored() -> None:
    network = build_network(Architecture(name="UNETR", arguments=ARGUMENTS["UNETR"] | {"save_attn": True}))
    network.eval()(torch.rand(1, 2, 16, 32, 32))
    assert all(module.att_mat.numel() == 0 for module in network.modules() if hasattr(module, "att_mat"))


def test_weights_of_backbones_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("no connection is allowed"))
    build_network(Architecture(name="FlexibleUNet", arguments=ARGUMENTS["FlexibleUNet"] | {"pretrained": True}))


def test_packages_are_hidden_only_from_the_importing_thread(tmp_path, monkeypatch):
    (tmp_path / "plotter_of_nothing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with monai_architectures.hide_packages_except(frozenset(["plotter_of_everything"])):
        with pytest.raises(ModuleNotFoundError, match="plotter_of_nothing"):
            import_module("plotter_of_nothing.colors")
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(import_module, "plotter_of_nothing").result().__name__ == "plotter_of_nothing"
    assert find_spec("plotter_of_nothing") is not None
    del sys.modules["plotter_of_nothing"]


def test_optional_library_does_not_leave_the_compiler_partly_imported(tmp_path):
    # As on a host with transformers, which MONAI imports and which imports PyTorch's compiler.
    (tmp_path / "transformers.py").write_text("import torch._dynamo\nimport torch._inductor\n")
    code = """
import sys
import service.models.architectures.monai
assert "transformers" not in sys.modules
assert "torch._dynamo" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
