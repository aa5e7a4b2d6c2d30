"""Training throughput and peak memory on this machine, with and without mixed precision."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from service.core.config import Settings
from service.core.hardware import devices
from service.engine.precision import DTYPES
from service.models.spec import ModelSpec
from service.training.examples import read_pairs
from service.training.from_files import Paths, prepare_training
from service.training.model_folder import draft_content
from service.training.training_loop import Trainer

HEADER = "| precision | crops per second | milliseconds per step | peak memory of a step |\n|---|---|---|---|"
WARM_UP, STEPS = 2, 10
# No round begins after so many seconds: where a precision is emulated, a step can take half a minute.
SECONDS = 60.0
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class StepCost:
    """Cost of a training step in one precision.

    seconds     median
    peak_bytes  largest memory of a step beyond that before it; None: not known
    """

    precision: str
    batch_size: int
    seconds: float
    peak_bytes: int | None

    def row(self) -> str:
        """Return a line of the table below `HEADER`."""
        memory = "not known" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.0f} MiB"
        rate = self.batch_size / self.seconds
        return f"| {self.precision} | {rate:.2f} | {1000 * self.seconds:.0f} | {memory} |"


def measure_steps(paths: Paths, settings: Settings, base: ModelSpec | None = None) -> list[StepCost]:
    """Measure steps of a training in FP32 and in mixed precision; write nothing. Raise what `train_model` raises."""
    device = devices.choose_device(settings.device.name)
    names = compared_precisions(settings.engine.precision, devices.native_precisions(device))
    make_trainer = prepare_training(read_pairs(*paths), settings, draft_content(base, "mine", []), base)
    trainers, peaks = list[Trainer](), list[int | None]()
    with tempfile.TemporaryDirectory(prefix="stackseg-benchmark-") as folder:
        for name in names:
            trainers.append(make_trainer(Path(folder), DTYPES[name]))
            peaks.append(_measure_peak(trainers[-1], device))
        times: list[list[float]] = [[] for _ in names]
        deadline = time.monotonic() + SECONDS
        for done in range(STEPS):
            if done and time.monotonic() > deadline:
                break
            # In turn, so that other work on the machine slows all of them alike.
            for trainer, taken in zip(trainers, times, strict=True):
                taken.append(trainer.time_step())
    size = trainers[0].plan.batch_size
    return [
        StepCost(name, size, statistics.median(taken), peak)
        for name, taken, peak in zip(names, times, peaks, strict=True)
    ]


def compared_precisions(setting: str, native: frozenset[torch.dtype]) -> tuple[str, str]:
    """Return FP32 and a mixed precision: the one that is set, else the narrowest that is native, else BF16."""
    narrow = [name for name in DTYPES if name != "fp32"]
    if setting in narrow:
        return "fp32", setting
    return "fp32", next((name for name in narrow if DTYPES[name] in native), "bf16")


def _measure_peak(trainer: Trainer, device: torch.device) -> int | None:
    """Return the bytes that the first steps took beyond those before them; None: not known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for _ in range(WARM_UP):
            trainer.time_step()
        return torch.cuda.max_memory_allocated(device) - before
    start = _reset_peak()
    for _ in range(WARM_UP):
        trainer.time_step()
    peak = _read_status("VmHWM")
    return None if start is None or peak is None else peak - start


def _reset_peak() -> int | None:
    """Give free memory back to the system and reset the kernel's peak; return the resident bytes, None: not known."""
    devices.return_pages()
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return None
    return _read_status("VmRSS")


def _read_status(field: str) -> int | None:
    """Return the bytes of a field of /proc/self/status; None: not known."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return values[0] if values else None
