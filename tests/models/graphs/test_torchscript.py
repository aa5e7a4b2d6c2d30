"""Tests of TorchScript programs, and of the checks that reject files before anything runs."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from service.core.errors import BrokenModel
from service.engine.prepare import prepare
from service.inference.runner.memory_estimate import measure_activation_bytes
from service.models.graphs.torchscript import load_torchscript

WINDOW = (1, 16, 16, 16)


class FileReader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_file("/etc/hostname", shared=False, size=1, dtype=torch.uint8).float()


class LoadingHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.training_steps = 0

    @torch.jit.export
    def __getstate__(self) -> int:
        return self.training_steps

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        self.training_steps = state
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        return x


def save_script(module: nn.Module, path: Path) -> Path:
    torch.jit.script(module).save(str(path))
    return path


def rewrite_entries(path: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> Path:
    """Write a copy of an archive with changed entry names or contents, and return its path."""
    copy_path = path.with_stem("other")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy_path, "w") as target:
        for name in source.namelist():
            target.writestr(*change(name, source.read(name)))
    return copy_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_program_gives_the_scores_of_its_module(
    bands_network: nn.Module, tmp_path: Path, dtype: torch.dtype
) -> None:
    program = load_torchscript(save_script(bands_network, tmp_path / "bands.ts"), WINDOW)
    prepared_program = prepare(program, torch.device("cpu"), dtype, torch.channels_last_3d)
    images = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores, expected = prepared_program(images.to(dtype)), bands_network(images)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, atol=1e-5 if dtype == torch.float32 else 0.1 * float(expected.std()))
    assert (
        measure_activation_bytes(program, (1, 1, 16, 16, 16))
        >= measure_activation_bytes(bands_network, (1, 1, 16, 16, 16))
        > 0
    )


def test_program_that_reads_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="aten::from_file"):
        load_torchscript(save_script(FileReader(), tmp_path / "reads.ts"), WINDOW)


def test_program_with_code_that_runs_during_loading_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_script(LoadingHook(), tmp_path / "runs.ts")
    monkeypatch.setattr(torch.jit, "load", lambda *_args, **_options: pytest.fail("the file was loaded"))
    with pytest.raises(BrokenModel, match=r"__[gs]etstate__, which is not allowed"):
        load_torchscript(path, WINDOW)


def pre_hook(self: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return inputs


def post_hook(self: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output


@pytest.mark.parametrize(
    ("register", "hook"), [("register_forward_hook", post_hook), ("register_forward_pre_hook", pre_hook)]
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_are_rejected_because_the_graph_does_not_contain_them(
    tmp_path: Path, register: str, hook: Any, is_nested: bool
) -> None:
    network = nn.Sequential(nn.ReLU())
    getattr(network[0] if is_nested else network, register)(hook)
    with pytest.raises(BrokenModel, match=r"__forward_(pre_)?hooks__"):
        load_torchscript(save_script(network, tmp_path / "hooked.ts"), WINDOW)


def test_entries_with_uppercase_names_are_checked_too(tmp_path: Path) -> None:
    def hide(name: str, content: bytes) -> tuple[str, bytes]:
        return name.replace("__torch__.py", "__torch__.PY").replace("data.pkl", "data.PKL"), content

    with pytest.raises(BrokenModel, match="which is not allowed"):
        load_torchscript(rewrite_entries(save_script(LoadingHook(), tmp_path / "runs.ts"), hide), WINDOW)


@pytest.mark.parametrize("name", [b"torch.classes.x", b"torch . classes", b"torch\nclasses", b"torch.\\\n classes"])
def test_extension_classes_are_found_in_any_spelling(tmp_path: Path, name: bytes) -> None:
    def append(entry: str, content: bytes) -> tuple[str, bytes]:
        return entry, content + name if entry.endswith(".py") else content

    with pytest.raises(BrokenModel, match="which is not allowed"):
        load_torchscript(rewrite_entries(save_script(nn.Sequential(nn.ReLU()), tmp_path / "plain.ts"), append), WINDOW)


def test_unrelated_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.ts"
    for content in (b"", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(BrokenModel, match="cannot be read as TorchScript"):
            load_torchscript(path, WINDOW)
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(BrokenModel, match="not a TorchScript file"):
        load_torchscript(path, WINDOW)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/code/net.py", b"")
        archive.writestr("x/data/0", bytes(2**26 + 1))
    with pytest.raises(BrokenModel, match="is compressed"):
        load_torchscript(path, WINDOW)
