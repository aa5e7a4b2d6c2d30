"""Measurement of training throughput and peak memory, with and without mixed precision."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from service.core.config import Settings
from service.core.hardware import devices
from service.engine.precision import DTYPES
from service.models.spec import ModelSpec, TargetName
from service.training.loop.setup import make_draft_spec, prepare_training
from service.training.loop.trainer import Trainer
from service.training.model_folder import draft_model
from service.training.stacks.annotated_stack import AnnotatedStack
from service.training.stacks.parts import hold_out_parts, resample_stack

HEADER = "| precision | crops per second | milliseconds per step | peak memory of a step |\n|---|---|---|---|"
WARM_UP_STEP_COUNT = 2
MEASURED_STEP_COUNT = 10
# Time after which no further step is measured. In an emulated precision, a step can take half a minute.
MAX_MEASURING_SECONDS = 60.0
CLEAR_REFS_FILE = Path("/proc/self/clear_refs")
STATUS_FILE = Path("/proc/self/status")


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step in one precision.

    seconds     median duration of a step
    peak_bytes  peak memory of a step minus the memory before the step; None if unknown
    """

    precision: str
    batch_size: int
    seconds: float
    peak_bytes: int | None

    def format_row(self) -> str:
        """Format a row of the table below `HEADER`."""
        memory_text = "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.0f} MiB"
        crops_per_second = self.batch_size / self.seconds
        return f"| {self.precision} | {crops_per_second:.2f} | {1000 * self.seconds:.0f} | {memory_text} |"


def measure_steps(
    stacks: Sequence[AnnotatedStack],
    settings: Settings,
    base: ModelSpec | None = None,
    target: TargetName | None = None,
) -> list[StepCost]:
    """Measure training steps in FP32 and in mixed precision. Raises the errors of `fine_tune`."""
    device = devices.choose_device(settings.device.name)
    precisions = choose_precisions(settings.engine.precision, devices.list_native_precisions(device))
    draft = make_draft_spec(draft_model(stacks, base, "mine", is_private=False, target=target))
    parts = hold_out_parts([resample_stack(stack, draft) for stack in stacks], settings.training.validation)
    make_trainer = prepare_training(parts, settings, draft, base)
    trainers, memory_peaks = list[Trainer](), list[int | None]()
    with tempfile.TemporaryDirectory(prefix="stackseg-benchmark-") as folder:
        for precision in precisions:
            trainers.append(make_trainer(settings, Path(folder), DTYPES[precision]))
            memory_peaks.append(_measure_peak_memory(trainers[-1], device))
        step_times: list[list[float]] = [[] for _ in precisions]
        deadline = time.monotonic() + MAX_MEASURING_SECONDS
        for measured_count in range(MEASURED_STEP_COUNT):
            if measured_count and time.monotonic() > deadline:
                break
            # Alternate between precisions, so that other processes on the host affect all precisions equally.
            for trainer, durations in zip(trainers, step_times, strict=True):
                durations.append(trainer.measure_step())
    batch_size = trainers[0].plan.batch_size
    return [
        StepCost(precision, batch_size, statistics.median(durations), peak_bytes)
        for precision, durations, peak_bytes in zip(precisions, step_times, memory_peaks, strict=True)
    ]


def choose_precisions(setting: str, native_dtypes: frozenset[torch.dtype]) -> tuple[str, str]:
    """Return FP32 and a mixed precision: the configured precision, else the first native precision, else BF16."""
    mixed_precisions = [name for name in DTYPES if name != "fp32"]
    if setting in mixed_precisions:
        return "fp32", setting
    return "fp32", next((name for name in mixed_precisions if DTYPES[name] in native_dtypes), "bf16")


def _measure_peak_memory(trainer: Trainer, device: torch.device) -> int | None:
    """Return the peak memory of the first steps minus the memory before these steps in bytes, or None if unknown."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        initial_bytes = torch.cuda.memory_allocated(device)
        for _ in range(WARM_UP_STEP_COUNT):
            trainer.measure_step()
        return torch.cuda.max_memory_allocated(device) - initial_bytes
    resident_bytes = _reset_peak_memory()
    for _ in range(WARM_UP_STEP_COUNT):
        trainer.measure_step()
    peak_bytes = _read_status("VmHWM")
    return None if resident_bytes is None or peak_bytes is None else peak_bytes - resident_bytes


def _reset_peak_memory() -> int | None:
    """Release free memory to the system and reset the peak counter. Return the resident bytes, or None if unknown."""
    devices.trim_malloc()
    try:
        CLEAR_REFS_FILE.write_text("5", encoding="ascii")
    except OSError:
        return None
    return _read_status("VmRSS")


def _read_status(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes, or None if unknown."""
    try:
        lines = STATUS_FILE.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return values[0] if values else None
