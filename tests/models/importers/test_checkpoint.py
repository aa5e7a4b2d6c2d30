"""Files of `torch.save`: pickles that are not trusted, what a file is called, and tensors that fit a network."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.architectures import ShuffleUNet
from service.models.importers.checkpoint import fit_tensors, read_checkpoint
from service.models.spec import Architecture

SMALL = Architecture(name="ShuffleUNet", arguments={"in_channels": 1, "out_channels": 2, "widths": [4, 8]})


class Trap:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_are_read_as_tensors_or_not_at_all(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    torch.save({"weight": torch.ones(2), "extra": Trap(trap)}, tmp_path / "trap.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(trap), protocol=2))
    for name in ("trap.pt", "plain.pt"):
        with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
            read_checkpoint(tmp_path / name)
    assert not trap.exists()
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UnsupportedPackage, match="something else"):
        read_checkpoint(tmp_path / "list.pt")


STRANGE: dict[str, tuple[Any, str]] = {
    "repeated": ({"w": torch.ones(1).expand(2**40)}, "more than 8589934592 bytes"),
    "repeated by many": ({f"w{n}": torch.ones(1).expand(2**28) for n in range(100)}, "more than 8589934592 bytes"),
    "sparse": ({"w": torch.ones(2).to_sparse()}, "something else"),
    "without numbers": ({"w": torch.ones(2, device="meta")}, "something else"),
    "complex": ({"w": torch.ones(2, dtype=torch.complex64)}, "something else"),
    "nothing": ({}, "something else"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_are_not_what_is_stored_are_refused(tmp_path: Path, kind: str) -> None:
    content, reason = STRANGE[kind]
    torch.save(content, tmp_path / "strange.pt")
    with pytest.raises(UnsupportedPackage, match=reason):
        read_checkpoint(tmp_path / "strange.pt")


def test_a_tensor_of_a_checkpoint_cannot_be_larger_than_its_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "grown.pt", "w") as new:
        for entry in old.infolist():
            # 200 as a number of one byte, and 2**31 - 1 as one of four: sizes, and what the storage is said to have.
            new.writestr(entry, old.read(entry).replace(b"K\xc8", b"J\xff\xff\xff\x7f"))
    with pytest.raises(UnsupportedPackage, match=r"cannot be read as plain tensors|more than"):
        read_checkpoint(tmp_path / "grown.pt")


def test_checkpoints_are_archives_of_one_reading(bands_network: nn.Module, tmp_path: Path) -> None:
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


# Calls of a pickle without what they take.
DAMAGED = (
    b".",
    b"(.",
    b"K\x01Q.",
    b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    b"ctorch._utils\n_rebuild_parameter\nK\x01R.",
)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_pickle_is_named(tmp_path: Path, damaged: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "damaged.pt", "w") as archive:
        for name, content in {"data.pkl": b"\x80\x02" + damaged, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"damaged/{name}", content)
    with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
        read_checkpoint(tmp_path / "damaged.pt")


STATE = {"head.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (STATE, ()),
        ({"model": STATE}, ("model",)),
        ({"module.head.weight": torch.ones(2)}, ()),
        # A configuration beside the tensors.
        ({"model": {"name": "unet"}, "state_dict": STATE}, ("state_dict",)),
    ],
)
def test_checkpoints_of_usual_shapes_are_understood(tmp_path: Path, content: Any, place: tuple[str, ...]) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    found = read_checkpoint(tmp_path / "checkpoint.pt")
    assert (list(found.tensors), found.place) == (["head.weight"], place)


def small_network() -> nn.Module:
    return ShuffleUNet(1, 2, (4, 8))


def test_a_training_checkpoint_is_called_so_and_gives_its_network(tmp_path: Path) -> None:
    network = small_network()
    optimiser = torch.optim.AdamW(network.parameters())
    content = {"epoch": 3, "weights": network.state_dict(), "optimizer": optimiser.state_dict()}
    torch.save(content, tmp_path / "last.ckpt")
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert (checkpoint.place, checkpoint.left_out) == (("weights",), ("epoch", "optimizer"))
    assert checkpoint.describe().startswith("a checkpoint, whose 'weights' holds ")
    assert "kernel of 4 x 8 x 3 x 3 x 3" in checkpoint.describe()
    torch.save(content | {"ema": network.state_dict()}, tmp_path / "two.ckpt")
    with pytest.raises(UnsupportedPackage, match=r"several networks \(weights, ema\)"):
        read_checkpoint(tmp_path / "two.ckpt")
    save_file(network.state_dict(), tmp_path / "plain.safetensors")
    assert read_checkpoint(tmp_path / "plain.safetensors").describe().startswith("a state dict of ")


def test_what_is_pickled_whole_is_named_with_the_line_that_saves_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(small_network(), tmp_path / "whole net.pth")
    with pytest.raises(
        UnsupportedPackage, match=r"a whole pickled module, service\.models\.architectures\.ShuffleUNet"
    ) as found:
        read_checkpoint(tmp_path / "whole net.pth")
    line = str(found.value).partition('python -c "')[2].rstrip('"')
    exec(line)
    assert fit_tensors(read_checkpoint(tmp_path / "tensors.pth").tensors, SMALL)
    torch.save({"state_dict": small_network().state_dict(), "options": argparse.Namespace()}, tmp_path / "options.pth")
    with pytest.raises(UnsupportedPackage, match=r"other objects, of argparse\.Namespace, beside tensors"):
        read_checkpoint(tmp_path / "options.pth")
    torch.save(small_network().state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedPackage, match=r"torch before 1\.6 wrote it\.(.|\n)*weights_only=True"):
        read_checkpoint(tmp_path / "old.pth")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "net.", "trainer.model."])
def test_prefixes_of_wrappers_are_taken_away(tmp_path: Path, prefix: str) -> None:
    state = small_network().state_dict()
    torch.save({f"{prefix}{key}": value for key, value in state.items()}, tmp_path / "wrapped.pth")
    assert fit_tensors(read_checkpoint(tmp_path / "wrapped.pth").tensors, SMALL).keys() == state.keys()


def test_weights_of_another_network_are_refused_with_what_differs() -> None:
    state = small_network().state_dict()
    wider = SMALL.model_copy(update={"arguments": SMALL.arguments | {"out_channels": 3}})
    with pytest.raises(
        BrokenModel, match=r"2 tensors are of another shape \(head\.weight is 16 x 4 x .* where 24 x 4 x "
    ):
        fit_tensors(state, wider)
    deeper = SMALL.model_copy(update={"arguments": SMALL.arguments | {"widths": [4, 8, 8]}})
    with pytest.raises(BrokenModel, match=r"tensors are missing \(down\.1\."):
        fit_tensors(state, deeper)
    with pytest.raises(BrokenModel, match=r"1 tensors are not in the network \(extra\)"):
        fit_tensors(state | {"extra": torch.ones(1)}, SMALL)
