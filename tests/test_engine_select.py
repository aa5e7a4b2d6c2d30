import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from service import config
from service.engine import select

EXAMPLE = torch.zeros(2, 1, 8, 8, 8)


class Counting(nn.Module):
    """Doubles its input; counts how often Python runs it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x


class Uncompilable(nn.Module):
    """Runs, but not while it is being compiled."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this module cannot be compiled\nand this line is not shown")
        return 2 * x


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken")


def test_eager_runs_the_module_itself():
    module = Counting()
    engine = select.build(module, EXAMPLE, config.Engine(kind="eager"))
    assert module.calls == select.WARM_UP_CALLS
    assert (engine.kind, engine.compile_mode, engine.warnings) == ("eager", None, ())
    assert engine.seconds > 0
    assert torch.equal(engine.network(EXAMPLE + 1), EXAMPLE + 2)


@pytest.mark.parametrize("kind", ["auto", "compiled"])
def test_a_module_that_cannot_be_compiled_runs_eagerly_with_a_warning(kind):
    engine = select.build(Uncompilable(), EXAMPLE, config.Engine(kind=kind))
    assert (engine.kind, engine.compile_mode) == ("eager", None)
    assert torch.equal(engine.network(EXAMPLE + 1), EXAMPLE + 2)
    (warning,) = engine.warnings
    assert "compiled engine failed" in warning
    assert "\n" not in warning


def test_a_module_that_does_not_run_at_all_is_an_error():
    with pytest.raises(RuntimeError, match="broken"):
        select.build(Broken(), EXAMPLE, config.Engine(kind="compiled"))


def test_cuda_graphs_on_a_cpu_run_eagerly_with_a_warning():
    engine = select.build(Counting(), EXAMPLE, config.Engine(kind="cudagraph"))
    assert engine.kind == "eager"
    assert "CUDA" in engine.warnings[0]


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        ("auto", "cpu", "default"),
        ("auto", "cuda", "reduce-overhead"),
        ("max-autotune", "cpu", "max-autotune"),
        ("default", "cuda", "default"),
    ],
)
def test_compile_modes(setting, device, expected):
    assert select.compile_mode(config.Engine(compile_mode=setting), torch.device(device)) == expected


NO_COMPILER = """
import torch
from torch import nn
from service import config
from service.engine import select

torch.set_num_threads(1)
module = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()).eval()
x = torch.rand(1, 1, 8, 8, 8)
engine = select.build(module, x, config.Engine())
assert engine.kind == "eager", engine
assert "compiled engine failed" in engine.warnings[0], engine
with torch.inference_mode():
    assert torch.equal(engine.network(x), module(x))
"""


def test_without_a_compiler_the_model_still_runs(tmp_path):
    environment = {
        "CXX": "/nowhere/g++",
        "PATH": "",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", NO_COMPILER]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
