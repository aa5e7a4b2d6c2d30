"""Programs of others: what is run, and what is refused before anything runs."""

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
from service.inference.runner.memory_estimate import activation_bytes
from service.models.graphs.torchscript import load_torchscript


class ReadsFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_file("/etc/hostname", shared=False, size=1, dtype=torch.uint8).float()


class RunsOnLoading(nn.Module):
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


def saved(module: nn.Module, path: Path) -> Path:
    torch.jit.script(module).save(str(path))
    return path


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes]]) -> Path:
    """A copy whose entries have other names or contents."""
    other = path.with_stem("other")
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(other, "w") as made:
        for name in plain.namelist():
            made.writestr(*change(name, plain.read(name)))
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_computes_what_its_module_does(bands_network: nn.Module, tmp_path: Path, dtype: torch.dtype) -> None:
    program = load_torchscript(saved(bands_network, tmp_path / "bands.ts"))
    prepared = prepare(program, torch.device("cpu"), dtype, torch.channels_last_3d)
    images = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores, expected = prepared(images.to(dtype)), bands_network(images)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, atol=1e-5 if dtype == torch.float32 else 0.1 * float(expected.std()))
    assert activation_bytes(program, (1, 1, 16, 16, 16)) >= activation_bytes(bands_network, (1, 1, 16, 16, 16)) > 0


def test_a_program_that_reads_files_is_refused_by_the_operator(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="aten::from_file"):
        load_torchscript(saved(ReadsFile(), tmp_path / "reads.ts"))


def test_a_program_that_would_run_while_it_is_loaded_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(RunsOnLoading(), tmp_path / "runs.ts")
    monkeypatch.setattr(torch.jit, "load", lambda *_args, **_options: pytest.fail("it was loaded"))
    with pytest.raises(BrokenModel, match=r"__[gs]etstate__, which is never run"):
        load_torchscript(path)


def before(self: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return given


def after(self: nn.Module, given: tuple[Tensor], made: Tensor) -> Tensor:
    return made


@pytest.mark.parametrize(
    ("register", "hook"), [("register_forward_hook", after), ("register_forward_pre_hook", before)]
)
@pytest.mark.parametrize("deep", [False, True])
def test_hooks_are_refused_because_the_graph_does_not_show_them(
    tmp_path: Path, register: str, hook: Any, deep: bool
) -> None:
    network = nn.Sequential(nn.ReLU())
    getattr(network[0] if deep else network, register)(hook)
    with pytest.raises(BrokenModel, match=r"__forward_(pre_)?hooks__"):
        load_torchscript(saved(network, tmp_path / "hooked.ts"))


def test_names_in_another_case_hide_nothing(tmp_path: Path) -> None:
    def hide(name: str, content: bytes) -> tuple[str, bytes]:
        return name.replace("__torch__.py", "__torch__.PY").replace("data.pkl", "data.PKL"), content

    with pytest.raises(BrokenModel, match="never run"):
        load_torchscript(rewritten(saved(RunsOnLoading(), tmp_path / "runs.ts"), hide))


@pytest.mark.parametrize("name", [b"torch.classes.x", b"torch . classes", b"torch\nclasses", b"torch.\\\n classes"])
def test_classes_of_extensions_are_found_however_they_are_spelt(tmp_path: Path, name: bytes) -> None:
    def append(entry: str, content: bytes) -> tuple[str, bytes]:
        return entry, content + name if entry.endswith(".py") else content

    with pytest.raises(BrokenModel, match="never run"):
        load_torchscript(rewritten(saved(nn.Sequential(nn.ReLU()), tmp_path / "plain.ts"), append))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.ts"
    for content in (b"", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(BrokenModel, match="cannot be read as TorchScript"):
            load_torchscript(path)
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(BrokenModel, match="not a TorchScript file"):
        load_torchscript(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/code/net.py", b"")
        archive.writestr("x/data/0", bytes(2**26 + 1))
    with pytest.raises(BrokenModel, match="is compressed"):
        load_torchscript(path)
