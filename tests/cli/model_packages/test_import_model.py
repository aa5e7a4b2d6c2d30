"""`stackseg models import` of a weights file without metadata, with options and with answers on a terminal."""

from __future__ import annotations

import os
import pty
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter, label
from torch import nn

from service.__main__ import main
from service.cli.model_packages.import_model import QUESTIONS, ask_questions
from service.inference.decoding.decoders import make_decoder
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.repository import read_spec

ARCHITECTURE = "nets.ShuffleUNet(in_channels=2, out_channels=2, widths=(4, 8))"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "my net.pth"
    network: nn.Module = ShuffleUNet(2, 2, (4, 8))
    torch.save({"epoch": 1, "model": network.state_dict()}, path)
    return path


def test_suggested_command_works_with_the_right_architecture(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "import", str(file), "--models", str(tmp_path / "models"), "--diameter", "20"]) == 1
    output = capsys.readouterr().err
    assert "my net.pth is a checkpoint with 46 tensors in 'model'" in output
    for question in QUESTIONS:
        assert question.option in output
    command = shlex.split(output.splitlines()[-1])
    assert command[0] == "stackseg"
    index = command.index("--architecture") + 1
    assert main([*command[1:index], "UNet(3, norm=Norm.BATCH)", *command[index + 1 :]]) == 1
    assert (
        "'UNet(3, norm=Norm.BATCH)' of --architecture is not valid: expected a name with keyword arguments"
        in capsys.readouterr().err
    )
    assert main([*command[1:index], ARCHITECTURE, *command[index + 1 :]]) == 0
    spec = read_spec(tmp_path / "models" / "my-net")
    assert (spec.input.channels, spec.input.diameter, spec.outputs) == (2, 20.0, ("background", "cell"))
    assert spec.input.normalisation.model_dump() == {
        "kind": "percentile",
        "low": 1.0,
        "high": 99.8,
        "eps": 0.0,
        "clip": None,
    }
    assert "other keys were ignored: epoch" in capsys.readouterr().out


def test_terminal_questions_are_repeated_until_answers_are_valid(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scores = ["background,cell", "", "softmax", "classes", "", "12"]
    answers = [ARCHITECTURE, "range:0", "range:0,255", "16,16,16", *scores]
    control, terminal = pty.openpty()
    os.write(control, "".join(f"{answer}\n" for answer in answers).encode())
    with os.fdopen(os.dup(terminal)) as reading, os.fdopen(terminal, "w") as writing:
        monkeypatch.setattr("sys.stdin", reading)
        monkeypatch.setattr("sys.stderr", writing)
        assert main(["models", "import", str(file), "--models", str(tmp_path / "models")]) == 0
    output = os.read(control, 2**16).decode()
    assert "zscore or range:LOW,HIGH" in output
    assert "The same command without questions:" in output
    spec = read_spec(tmp_path / "models" / "my-net")
    assert spec.input.voxel_size is None
    assert (spec.input.diameter, spec.input.roi_size) == (12.0, (16, 16, 16))
    assert "my-net/1, ShuffleUNet" in capfd.readouterr().out


def test_only_missing_metadata_is_requested() -> None:
    requested = list[str]()

    def answer(prompt: str) -> str:
        requested.append(prompt.partition(":")[0])
        return "" if "original resolution" in prompt else "sigmoid"

    assert ask_questions({"activation", "input.roi_size"}, {"--roi-size": "8,8,8"}, answer) == {
        "--activation": "sigmoid"
    }
    assert requested == ["activation", "voxel-size", "diameter"]


@pytest.mark.parametrize(("decoding", "sigma"), [("boundaries:cell", 3), ("classes", None)])
def test_option_for_the_kind_of_decoding_keeps_the_other_keys_of_the_file(
    file: Path, tmp_path: Path, decoding: str, sigma: float | None
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("decoding: {kind: boundaries, watershed_sigma: 3}\nactivation: sigmoid\noutputs: [cell, other]\n")
    options = [
        "--with",
        str(keys),
        "--decoding",
        decoding,
        "--architecture",
        ARCHITECTURE,
        "--models",
        str(tmp_path / "m"),
    ]
    options += ["--normalisation", "zscore", "--roi-size", "16,16,16"]
    file = file.rename(tmp_path / "net.chkpt")
    assert main(["models", "import", str(file), *options]) == 0
    decoding_block = read_spec(tmp_path / "m" / "net").decoding
    assert decoding_block.kind == decoding.partition(":")[0]
    assert getattr(decoding_block, "watershed_sigma", None) == sigma


def test_network_with_one_output_is_decoded_into_connected_components(tmp_path: Path) -> None:
    torch.save(ShuffleUNet(1, 1, (4, 8)).state_dict(), tmp_path / "net.pth")
    options = ["--architecture", "ShuffleUNet(in_channels=1, out_channels=1, widths=(4, 8))", "--activation", "sigmoid"]
    options += ["--normalisation", "zscore", "--roi-size", "16,16,16", "--outputs", "cell"]
    options += ["--decoding", "components:cell", "--models", str(tmp_path / "m")]
    assert main(["models", "import", str(tmp_path / "net.pth"), *options]) == 0
    spec = read_spec(tmp_path / "m" / "net")
    scores = gaussian_filter(np.random.default_rng(0).normal(size=(16, 32, 48)), 1.5) * 40 - 4
    decoder = make_decoder(spec, (16, 32, 48), "labels", None)
    decoder.add(0, 0, torch.from_numpy(scores).float()[None, None])
    labels = decoder.finish().pixels
    components, count = label(scores > 0, np.ones((3, 3, 3)))
    components[(np.bincount(components.ravel()) < 16)[components]] = 0  # `minimum_size`
    assert 5 < labels.max() < count
    # Each component is one object, although most have several maxima.
    assert len(np.unique(np.stack([components, labels]).reshape(2, -1), axis=1).T) == labels.max() + 1
    assert ((components > 0) == (labels > 0)).all()
