"""Weights of MONAI's networks: import them from a state dict on the command line, and segment a stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from models.architectures.test_build import ARGUMENTS

from service.models.architectures.build import build_network
from service.models.repository import read_spec
from service.models.spec import Architecture

WINDOW = (16, 32, 32)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("AttentionUnet", WINDOW),
        # This network has 45 million parameters.
        pytest.param("VNet", WINDOW, marks=pytest.mark.thorough),
        ("SegResNetDS", WINDOW),
        ("MedNeXt", WINDOW),
        ("SwinUNETR", (64, 32, 32)),
        ("UNETR", WINDOW),
        ("FlexibleUNet", (32, 32, 32)),
    ],
)
def test_network_is_imported_and_segments_a_stack(
    name: str,
    window: tuple[int, int, int],
    tmp_path: Path,
    run_stackseg: Callable[..., str],
    write_config: Callable[..., Path],
) -> None:
    arguments: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in ARGUMENTS[name].items()
    }
    network = build_network(Architecture(name=name, arguments=arguments)).eval()
    torch.save(network.state_dict(), tmp_path / "net.pth")
    call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    run_stackseg(
        *("models", "import", tmp_path / "net.pth", "--models", tmp_path / "models", "--architecture", call),
        *("--normalisation", "range:0,1000", "--roi-size", ",".join(map(str, window)), "--activation", "softmax"),
        *("--outputs", "background,a,b", "--decoding", "classes"),
    )
    assert read_spec(tmp_path / "models" / "net").input.channels == 2
    image = np.random.default_rng(0).integers(0, 1000, (*window[:1], 2, *window[1:]), np.uint16)
    tifffile.imwrite(tmp_path / "stack.tif", image, imagej=True, metadata={"axes": "ZCYX"})
    config = write_config(tmp_path / "models", engine={"kind": "eager", "precision": "fp32"})
    run_stackseg(
        "segment", tmp_path / "stack.tif", "-o", tmp_path / "classes.tif", "--config", config, "--output", "classes"
    )
    with torch.inference_mode():
        scores = network(torch.from_numpy(image.astype(np.float32)).permute(1, 0, 2, 3)[None] / 1000)
    classes = tifffile.imread(tmp_path / "classes.tif")
    assert np.mean(classes == scores.argmax(1)[0].numpy()) > 0.999
