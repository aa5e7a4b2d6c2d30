"""What every import has in common: archives and pickles that are not trusted, names, TorchScript files."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from importing import import_model
from torch import Tensor, nn

from service.__main__ import main
from service.core.errors import BrokenModel, UnsupportedPackage
from service.models.importers.archives import unpack
from service.models.importers.import_model import read_state_dict
from service.models.loader import load_network
from service.models.repository import read_spec

STATED: dict[str, Any] = {
    "input": {"normalisation": {"kind": "range", "low": 0.0, "high": 2800.0}, "roi_size": [16, 32, 32]},
    "outputs": ["background", "dim", "bright"],
    "activation": "softmax",
    "decoding": {"kind": "classes"},
}


class Trap:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def archive_of(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", "a\\..\\escaped"])
def test_entries_that_would_land_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    path = archive_of(tmp_path / "package.zip", **{name: b"x"})
    with pytest.raises(UnsupportedPackage, match="outside of its own folder"), unpack(path, 1000):
        pass
    assert not list(tmp_path.parent.rglob("escaped"))


def test_links_and_too_much_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UnsupportedPackage, match="'link'"), unpack(tmp_path / "link.zip", 1000):
        pass
    bomb = archive_of(tmp_path / "bomb.zip", zeros=bytes(10_000_000))
    with pytest.raises(UnsupportedPackage, match="more than 1000 bytes"), unpack(bomb, 1000):
        pass


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.zip").write_bytes(b"no archive")
    with pytest.raises(UnsupportedPackage, match="cannot be unpack"):
        import_model(tmp_path / "notes.zip", tmp_path / "models", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedPackage, match="nor a MONAI bundle"):
        import_model(tmp_path / "empty", tmp_path / "models", {})
    with pytest.raises(UnsupportedPackage, match="no such file"):
        import_model(tmp_path / "nowhere", tmp_path / "models", {})


def test_pickles_are_read_as_tensors_or_not_at_all(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    torch.save({"weight": torch.ones(2), "extra": Trap(trap)}, tmp_path / "trap.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(trap), protocol=2))
    for name in ("trap.pt", "plain.pt"):
        with pytest.raises(UnsupportedPackage, match="cannot be read as plain tensors"):
            read_state_dict(tmp_path / name)
    assert not trap.exists()
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UnsupportedPackage, match="something else"):
        read_state_dict(tmp_path / "list.pt")


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
        read_state_dict(tmp_path / "strange.pt")


def test_a_tensor_of_a_checkpoint_cannot_be_larger_than_its_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "grown.pt", "w") as new:
        for entry in old.infolist():
            # 200 as a number of one byte, and 2**31 - 1 as one of four: sizes, and what the storage is said to have.
            new.writestr(entry, old.read(entry).replace(b"K\xc8", b"J\xff\xff\xff\x7f"))
    with pytest.raises(UnsupportedPackage, match=r"cannot be read as plain tensors|more than"):
        read_state_dict(tmp_path / "grown.pt")


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
            read_state_dict(tmp_path / name)


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
        read_state_dict(tmp_path / "damaged.pt")


@pytest.mark.parametrize("wrap", [dict, lambda s: {"model": s}, lambda s: {f"module.{k}": v for k, v in s.items()}])
def test_checkpoints_of_usual_shapes_are_understood(tmp_path: Path, wrap: Any) -> None:
    torch.save(wrap({"head.weight": torch.ones(2)}), tmp_path / "checkpoint.pt")
    assert list(read_state_dict(tmp_path / "checkpoint.pt")) == ["head.weight"]


def test_a_bare_program_needs_everything_stated(bands_network: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "My Bands.ts"
    torch.jit.script(bands_network).save(str(file))
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation.*input\.roi_size.*outputs.*decoding"):
        import_model(file, tmp_path / "models", {}, trust=True)
    spec, notes = import_model(file, tmp_path / "models", STATED, trust=True)
    assert (spec.name, spec.network) == ("my-bands", "torchscript")
    assert any("no test of its own" in note for note in notes)
    with pytest.raises(UnsupportedPackage, match="is there already"):
        import_model(file, tmp_path / "models", STATED, trust=True)


def test_a_program_that_nobody_trusts_is_neither_imported_nor_loaded(bands_network: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "bands.ts"
    torch.jit.script(bands_network).save(str(file))
    with pytest.raises(UnsupportedPackage, match=r"bands\.ts: TorchScript is a program.*--trust"):
        import_model(file, tmp_path / "models", STATED)
    spec = import_model(file, tmp_path / "models", STATED, trust=True).spec
    assert spec.weights.trusted
    load_network(spec)
    stated = spec.folder / "model.yaml"
    stated.write_text(stated.read_text().replace("trusted: true", "trusted: false"))
    with pytest.raises(BrokenModel, match=r"weights\.trusted: true"):
        load_network(read_spec(spec.folder))


def test_an_exported_graph_is_imported_and_computes_the_same(bands_network: nn.Module, tmp_path: Path) -> None:
    file, image = tmp_path / "bands.pt2", torch.rand(1, 1, 16, 16, 16)
    torch.export.save(torch.export.export(bands_network, (image,)), file)
    spec, _ = import_model(file, tmp_path / "models", STATED)
    assert (spec.name, spec.network, spec.weights.file) == ("bands", "exported", "weights.pt2")
    assert torch.allclose(load_network(spec)(image), bands_network(image))


def test_a_network_that_keeps_what_it_is_sent_is_refused(tmp_path: Path) -> None:
    """Its answer would hold the pixels of another request."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, 3, 16, 32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mul(self.gain, x)

    torch.export.save(torch.export.export(Gain().eval(), (torch.rand(1, 1, 16, 32, 32),)), tmp_path / "plain.pt2")
    import_model(tmp_path / "plain.pt2", tmp_path / "models", STATED)
    with zipfile.ZipFile(tmp_path / "plain.pt2") as old, zipfile.ZipFile(tmp_path / "keeps.pt2", "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry).replace(b"aten.mul.Tensor", b"aten.mul_.Tensor"))
    with pytest.raises(BrokenModel, match="changes its own tensors"):
        import_model(tmp_path / "keeps.pt2", tmp_path / "models", STATED)


def test_the_command_imports_and_then_lists(
    bands_network: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, stated, config = tmp_path / "bands.ts", tmp_path / "stated.yaml", tmp_path / "config.yaml"
    torch.jit.script(bands_network).save(str(file))
    config.write_text(f"models: {{folder: {tmp_path / 'models'}}}\n")
    stated.write_text("outputs: [background, dim, bright]\n")
    arguments = ["models", "import", str(file), "--with", str(stated), "--config", str(config)]
    assert main([*arguments, "--trust"]) == 1
    assert "input.roi_size" in capsys.readouterr().err
    stated.write_text(str(STATED))
    assert main([*arguments, "--name", "mine"]) == 1
    assert "--trust" in capsys.readouterr().err
    assert main([*arguments, "--name", "mine", "--trust"]) == 0
    assert "mine/1, torchscript" in capsys.readouterr().out
    assert main(["models", "--config", str(config)]) == 0
    assert "mine/1" in capsys.readouterr().out
