"""Tests of reading checkpoints: untrusted pickles, descriptions of files, and matching tensors with a network."""

from __future__ import annotations

import argparse
import pickle
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from importing import Trap
from safetensors.torch import save_file
from torch import nn

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.architectures.shuffle_unet import ShuffleUNet
from service.models.importers.checkpoint import fit_tensors, list_other_tensors, read_checkpoint
from service.models.spec import Architecture

SMALL_ARCHITECTURE = Architecture(name="ShuffleUNet", arguments={"in_channels": 1, "out_channels": 2, "widths": [4, 8]})


def test_pickles_with_objects_other_than_tensors_are_rejected(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    torch.save({"weight": torch.ones(2), "extra": Trap(trap)}, tmp_path / "trap.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(trap), protocol=2))
    for name in ("trap.pt", "plain.pt"):
        with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
            read_checkpoint(tmp_path / name)
    assert not trap.exists()
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UnsupportedPackage, match="does not contain the tensors of one network"):
        read_checkpoint(tmp_path / "list.pt")


UNUSUAL_TENSORS: dict[str, tuple[Any, str]] = {
    "repeated": ({"w": torch.ones(1).expand(2**40)}, "more than 8589934592 bytes"),
    "many repeated": ({f"w{n}": torch.ones(1).expand(2**28) for n in range(100)}, "more than 8589934592 bytes"),
    "sparse": ({"w": torch.ones(2).to_sparse()}, "no tensors of a network"),
    "meta": ({"w": torch.ones(2, device="meta")}, "no tensors of a network"),
    "complex": ({"w": torch.ones(2, dtype=torch.complex64)}, "no tensors of a network"),
    "empty": ({}, "no tensors of a network"),
}


@pytest.mark.parametrize("kind", UNUSUAL_TENSORS)
def test_unusual_tensors_are_rejected(tmp_path: Path, kind: str) -> None:
    content, reason = UNUSUAL_TENSORS[kind]
    torch.save(content, tmp_path / "unusual.pt")
    with pytest.raises(UnsupportedPackage, match=reason):
        read_checkpoint(tmp_path / "unusual.pt")


def test_tensor_cannot_be_larger_than_its_stored_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as source, zipfile.ZipFile(tmp_path / "grown.pt", "w") as target:
        for entry in source.infolist():
            # Replace the number 200 (one byte) with 2**31 - 1 (four bytes) in the sizes of the tensor and the storage.
            target.writestr(entry, source.read(entry).replace(b"K\xc8", b"J\xff\xff\xff\x7f"))
    with pytest.raises(UnsupportedPackage, match=r"cannot be read as plain tensors|more than"):
        read_checkpoint(tmp_path / "grown.pt")


def test_ambiguous_and_unrelated_archives_are_rejected(bands_network: nn.Module, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(bands_network).save(str(tmp_path / "program.pt"))
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "prefixed.pt").write_bytes(b"#!" + (tmp_path / "plain.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "plain.pt") as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in members.items():
            bomb.writestr(name, bytes(2**26 + 1) if name.endswith("data/0") else content)
    for name in ("old.pt", "program.pt", "prefixed.pt", "bomb.pt"):
        with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
            read_checkpoint(tmp_path / name)


# Pickles with calls whose arguments are missing.
DAMAGED_PICKLES = (
    b".",
    b"(.",
    b"K\x01Q.",
    b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    b"ctorch._utils\n_rebuild_parameter\nK\x01R.",
)


@pytest.mark.parametrize("damaged", DAMAGED_PICKLES)
def test_damaged_pickle_is_rejected(tmp_path: Path, damaged: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "damaged.pt", "w") as archive:
        for name, content in {"data.pkl": b"\x80\x02" + damaged, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"damaged/{name}", content)
    with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
        read_checkpoint(tmp_path / "damaged.pt")


STATE_DICT = {"head.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("content", "path"),
    [
        (STATE_DICT, ()),
        ({"model": STATE_DICT}, ("model",)),
        ({"module.head.weight": torch.ones(2)}, ()),
        # A configuration next to the tensors.
        ({"model": {"name": "unet"}, "state_dict": STATE_DICT}, ("state_dict",)),
    ],
)
def test_common_checkpoint_layouts_are_supported(tmp_path: Path, content: Any, path: tuple[str, ...]) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    checkpoint = read_checkpoint(tmp_path / "checkpoint.pt")
    assert (list(checkpoint.tensors), checkpoint.keys) == (["head.weight"], path)


def make_small_network() -> nn.Module:
    return ShuffleUNet(1, 2, (4, 8))


def test_training_checkpoint_is_described_and_read(tmp_path: Path) -> None:
    network = make_small_network()
    optimizer = torch.optim.AdamW(network.parameters())
    content = {"epoch": 3, "weights": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "last.ckpt")
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert (checkpoint.keys, checkpoint.skipped_keys) == (("weights",), ("epoch", "optimizer"))
    assert re.match(r"a checkpoint with \d+ tensors in 'weights' \(other keys: epoch", checkpoint.describe())
    assert "have the shape 4 x 8 x 3 x 3 x 3" in checkpoint.describe()
    torch.save(content | {"ema": network.state_dict()}, tmp_path / "two.ckpt")
    with pytest.raises(UnsupportedPackage, match=r"several networks \(weights, ema\)"):
        read_checkpoint(tmp_path / "two.ckpt")
    save_file(network.state_dict(), tmp_path / "plain.safetensors")
    assert read_checkpoint(tmp_path / "plain.safetensors").describe().startswith("a state dict of ")


def test_error_for_a_pickled_module_contains_a_command_that_saves_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(make_small_network(), tmp_path / "whole net.pth")
    with pytest.raises(
        UnsupportedPackage, match=r"pickled module, service\.models\.architectures\.shuffle_unet\.ShuffleUNet"
    ) as caught:
        read_checkpoint(tmp_path / "whole net.pth")
    code = str(caught.value).partition('python -c "')[2].rstrip('"')
    exec(code)
    assert fit_tensors(read_checkpoint(tmp_path / "tensors.pth").tensors, SMALL_ARCHITECTURE)
    torch.save(
        {"state_dict": make_small_network().state_dict(), "options": argparse.Namespace()}, tmp_path / "options.pth"
    )
    with pytest.raises(UnsupportedPackage, match=r"it contains objects other than tensors: argparse\.Namespace"):
        read_checkpoint(tmp_path / "options.pth")
    torch.save(make_small_network().state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedPackage, match=r"written by PyTorch before 1\.6\.(.|\n)*weights_only=True"):
        read_checkpoint(tmp_path / "old.pth")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "net.", "trainer.model."])
def test_prefixes_of_wrappers_are_removed(tmp_path: Path, prefix: str) -> None:
    state = make_small_network().state_dict()
    torch.save({f"{prefix}{key}": value for key, value in state.items()}, tmp_path / "wrapped.pth")
    assert fit_tensors(read_checkpoint(tmp_path / "wrapped.pth").tensors, SMALL_ARCHITECTURE).keys() == state.keys()


def test_weights_of_a_different_network_are_rejected_with_the_differences() -> None:
    state = make_small_network().state_dict()
    wider_architecture = SMALL_ARCHITECTURE.model_copy(
        update={"arguments": SMALL_ARCHITECTURE.arguments | {"out_channels": 3}}
    )
    with pytest.raises(
        BrokenModel, match=r"2 tensors are of a different shape \(head\.weight is 16 x 4 x .* instead of 24 x 4 x "
    ):
        fit_tensors(state, wider_architecture)
    deeper_architecture = SMALL_ARCHITECTURE.model_copy(
        update={"arguments": SMALL_ARCHITECTURE.arguments | {"widths": [4, 8, 8]}}
    )
    with pytest.raises(BrokenModel, match=r"tensors are missing \(down\.1\."):
        fit_tensors(state, deeper_architecture)
    with pytest.raises(BrokenModel, match=r"1 tensor is not in the network \(extra\)"):
        fit_tensors(state | {"extra": torch.ones(1)}, SMALL_ARCHITECTURE)


def make_state(prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {prefix + name: tensor for name, tensor in ShuffleUNet(1, 2, (4, 8)).state_dict().items()}


@pytest.mark.parametrize("value", [np.float64(0.7), np.float32(0.2), np.int64(3), np.bool_(True), np.arange(3.0)])
@pytest.mark.parametrize("key", ["network_weights", "model_state"])
def test_numpy_values_next_to_the_tensors_are_ignored(key: str, value: Any, tmp_path: Path) -> None:
    torch.save({key: make_state(), "metrics": {"best": [value]}, "epoch": 3}, tmp_path / "last.pth")
    checkpoint = read_checkpoint(tmp_path / "last.pth")
    assert checkpoint.keys == (key,)
    assert checkpoint.skipped_keys == ("metrics", "epoch")
    assert fit_tensors(checkpoint.tensors, SMALL_ARCHITECTURE).keys() == make_state().keys()


PICKLED_CONTENTS: dict[str, Any] = {
    "unusual key": {"network_weights": make_state(), "options": argparse.Namespace(lr=1)},
    "nested keys": {"a": {'b $(exit 1) "`': make_state(), "n": 1}, "options": argparse.Namespace(lr=1)},
    "module under a key": {"model": nn.Sequential(nn.Conv3d(1, 2, 1)), "epoch": 1},
    "module": nn.Sequential(nn.Conv3d(1, 2, 1)),
    "several networks": {"generator": make_state(), "discriminator": make_state()},
}


def split_in_shell(command: str) -> list[str]:
    """Return the words of a command as the shell expands them."""
    words = subprocess.check_output(["/bin/sh", "-c", f"printf '%s\\0' {command}"], text=True)
    return words.removesuffix("\0").split("\0")


@pytest.mark.parametrize("kind", PICKLED_CONTENTS)
def test_advised_command_saves_the_tensors_of_the_network(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(PICKLED_CONTENTS[kind], tmp_path / "my $HOME.pth")
    with pytest.raises(UnsupportedPackage, match=r'import tensors\.pth:\n  python -c "') as error:
        read_checkpoint(tmp_path / "my $HOME.pth")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = str(error.value).splitlines()[-1].strip()
    if kind == "nested keys":
        # The key with special characters must reach Python unchanged. Starting Python and torch takes long.
        command = command.replace("python", shlex.quote(sys.executable), 1)
        subprocess.run(["/bin/sh", "-c", command], check=True)
    else:
        interpreter, option, program = split_in_shell(command)
        assert (interpreter, option) == ("python", "-c")
        exec(program, {})
    assert read_checkpoint(folder / "tensors.pth").tensors


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "model._orig_mod.", "net.module.", "a.b."]
)
@pytest.mark.parametrize("others", [[], ["criterion.weight", "ema.decay"]])
def test_prefixes_and_tensors_of_other_modules_are_removed(prefix: str, others: list[str], tmp_path: Path) -> None:
    state = make_state(prefix) | {name: torch.ones(2) for name in others}
    torch.save({"state_dict": state, "epoch": 1}, tmp_path / "last.ckpt")
    tensors = read_checkpoint(tmp_path / "last.ckpt").tensors
    if others and prefix in {"", "module.", "_orig_mod.", "module._orig_mod."}:
        with pytest.raises(BrokenModel, match=r"2 tensors are not in the network \(criterion\.weight, ema\.decay\)"):
            fit_tensors(tensors, SMALL_ARCHITECTURE)
        return
    fitted_tensors = fit_tensors(tensors, SMALL_ARCHITECTURE)
    assert all(torch.equal(tensor, fitted_tensors[name]) for name, tensor in make_state().items())
    assert list_other_tensors(tensors, fitted_tensors) == others


def test_tensors_with_the_prefix_of_the_network_are_not_ignored() -> None:
    tensors = make_state("model.") | {"model.extra.weight": torch.ones(2), "criterion.weight": torch.ones(2)}
    with pytest.raises(BrokenModel, match=r"1 tensor is not in the network \(extra\.weight\)"):
        fit_tensors(tensors, SMALL_ARCHITECTURE)


def test_copies_of_the_network_are_not_chosen_silently() -> None:
    tensors = make_state("model.") | make_state("ema_model.", seed=1)
    with pytest.raises(BrokenModel, match=r"several sets of weights .* begin with 'model\.', 'ema_model\.'"):
        fit_tensors(tensors, SMALL_ARCHITECTURE)
