"""Tests of features common to all imports: untrusted archives, model names, trust, and the command."""

from __future__ import annotations

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
from service.models.loader import load_network
from service.models.repository import read_spec

OVERRIDES: dict[str, Any] = {
    "input": {"normalisation": {"kind": "range", "low": 0.0, "high": 2800.0}, "roi_size": [16, 32, 32]},
    "outputs": ["background", "dim", "bright"],
    "activation": "softmax",
    "decoding": {"kind": "classes"},
}


def test_archive_with_too_many_bytes_is_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10_000_000))
    with pytest.raises(UnsupportedPackage, match="more than 1000 bytes"), unpack(tmp_path / "bomb.zip", 1000):
        pass


def test_archive_with_a_damaged_member_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "damaged.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"deflated " * 100)
    content = bytearray(path.read_bytes())
    # The first byte after the header and the name begins the compressed data.
    content[31] = 0xFF
    path.write_bytes(content)
    with pytest.raises(UnsupportedPackage, match=r"cannot be unpacked: "), unpack(path, 10_000):
        pass


def test_unsupported_paths_and_archives_are_rejected(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "outside.zip", "w") as archive:
        archive.writestr("../escaped", b"x")
    with pytest.raises(UnsupportedPackage, match=r"cannot be unpacked: .* outside the target folder"):
        import_model(tmp_path / "outside.zip", tmp_path / "models", {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedPackage, match="nor a MONAI bundle"):
        import_model(tmp_path / "empty", tmp_path / "models", {})
    with pytest.raises(UnsupportedPackage, match="does not exist"):
        import_model(tmp_path / "nowhere", tmp_path / "models", {})


def test_system_files_and_additional_folders_in_archives_are_ignored(tmp_path: Path) -> None:
    names = ["a/cells/rdf.yaml", "a/.DS_Store", "__MACOSX/a/cells/._rdf.yaml", "__MACOSX/._a", "a/cells/._rdf.yaml"]
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        for name in names:
            archive.writestr(name, name)
    with unpack(tmp_path / "mac.zip", 1000) as root:
        assert root.name == "cells"
        assert [path.name for path in root.iterdir()] == ["rdf.yaml"]
        assert (root / "rdf.yaml").read_text() == "a/cells/rdf.yaml"


@pytest.fixture
def script_file(bands_network: nn.Module, tmp_path: Path) -> Path:
    file = tmp_path / "My Bands.ts"
    torch.jit.script(bands_network).save(str(file))
    return file


def test_torchscript_file_requires_all_settings(script_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedPackage, match=r"input\.normalisation.*input\.roi_size.*outputs.*decoding"):
        import_model(script_file, tmp_path / "models", {}, trust=True)
    spec, notes = import_model(script_file, tmp_path / "models", OVERRIDES, trust=True)
    assert (spec.name, spec.network_name) == ("my-bands", "torchscript")
    assert any("contains no test" in note for note in notes)
    with pytest.raises(UnsupportedPackage, match="already exists"):
        import_model(script_file, tmp_path / "models", OVERRIDES, trust=True)


def test_untrusted_program_is_neither_imported_nor_loaded(script_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedPackage, match=r"My Bands\.ts: a TorchScript file is a program.*--trust"):
        import_model(script_file, tmp_path / "models", OVERRIDES)
    spec = import_model(script_file, tmp_path / "models", OVERRIDES, trust=True).spec
    assert spec.weights.trusted
    load_network(spec)
    model_file = spec.folder / "model.yaml"
    model_file.write_text(model_file.read_text().replace("trusted: true", "trusted: false"))
    with pytest.raises(BrokenModel, match=r"weights\.trusted: true"):
        load_network(read_spec(spec.folder))


def test_imported_torch_export_graph_gives_the_same_scores(bands_network: nn.Module, tmp_path: Path) -> None:
    file, image = tmp_path / "bands.pt2", torch.rand(1, 1, 16, 16, 16)
    torch.export.save(torch.export.export(bands_network, (image,)), file)
    spec, _ = import_model(file, tmp_path / "models", OVERRIDES)
    assert (spec.name, spec.network_name, spec.weights.file) == ("bands", "exported", "weights.pt2")
    assert torch.allclose(load_network(spec)(image), bands_network(image))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("../Outside", "outside"), ("a/b", "a-b"), ("My Nuclei", "my-nuclei"), ("x" * 65, "x" * 64)],
)
def test_invalid_name_is_rejected_before_a_folder_is_created(
    bands_network: nn.Module, tmp_path: Path, name: str, suggestion: str
) -> None:
    file = tmp_path / "bands.pt2"
    torch.export.save(torch.export.export(bands_network, (torch.rand(1, 1, 16, 16, 16),)), file)
    with pytest.raises(UnsupportedPackage, match=rf"is not valid.* for example {suggestion}\."):
        import_model(file, tmp_path / "models", OVERRIDES | {"name": name})
    assert list(tmp_path.iterdir()) == [file]


def test_error_for_an_invalid_value_contains_only_keys_of_the_file(bands_network: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "bands.pt2"
    torch.export.save(torch.export.export(bands_network, (torch.rand(1, 1, 16, 16, 16),)), file)
    normalization = {"kind": "range", "low": 5.0, "high": 5.0}
    inputs = OVERRIDES["input"] | {"normalisation": normalization}
    with pytest.raises(BrokenModel, match=r"model\.yaml: input\.normalisation\.range: low and high must differ"):
        import_model(file, tmp_path / "models", OVERRIDES | {"input": inputs})


def test_network_that_modifies_its_tensors_is_rejected(tmp_path: Path) -> None:
    """Its scores could reveal pixels from another request."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, 3, 16, 32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mul(self.gain, x)

    torch.export.save(torch.export.export(Gain().eval(), (torch.rand(1, 1, 16, 32, 32),)), tmp_path / "plain.pt2")
    import_model(tmp_path / "plain.pt2", tmp_path / "models", OVERRIDES)
    with zipfile.ZipFile(tmp_path / "plain.pt2") as source, zipfile.ZipFile(tmp_path / "keeps.pt2", "w") as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry).replace(b"aten.mul.Tensor", b"aten.mul_.Tensor"))
    with pytest.raises(BrokenModel, match="modifies its own tensors"):
        import_model(tmp_path / "keeps.pt2", tmp_path / "models", OVERRIDES)


def test_command_imports_a_model_and_lists_it(
    script_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, config = tmp_path / "overrides.yaml", tmp_path / "config.yaml"
    config.write_text(f"models: {{folder: {tmp_path / 'models'}}}\n")
    overrides.write_text(str(OVERRIDES))
    arguments = [
        "models",
        "import",
        str(script_file),
        "--with",
        str(overrides),
        "--config",
        str(config),
        "--name",
        "mine",
    ]
    assert main(arguments) == 1
    assert "--trust" in capsys.readouterr().err
    assert main([*arguments, "--trust"]) == 0
    assert "mine/1, torchscript" in capsys.readouterr().out
    assert main(["models", "--config", str(config)]) == 0
    assert "mine/1" in capsys.readouterr().out
