"""Configurations of engines, the trials of some, the plans made of these, and their files. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, PlainSerializer, PlainValidator, PositiveInt, TypeAdapter, ValidationError, WithJsonSchema

from service.core.sections.computing import MAX_STREAMS

FOLDER = "plans"


@dataclass(frozen=True)
class EngineConfig:
    """One way to run a network.

    engine          as in `engine.kind`, never auto
    precision       bf16, fp16 or fp32
    memory_format   contiguous or channels_last_3d
    sw_batch_size   windows per call
    compile_mode    of torch.compile; None unless compiled
    streams         batches that are computed at the same time, on a CPU with a part of the cores each
    """

    engine: str
    precision: Annotated[str, Field(pattern="^(bf16|fp16|fp32)$")]
    memory_format: Annotated[str, Field(pattern="^(contiguous|channels_last_3d)$")]
    sw_batch_size: PositiveInt
    compile_mode: str | None = None
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 1

    def __str__(self) -> str:
        mode = f" ({self.compile_mode})" if self.compile_mode else ""
        streams = f" in {self.streams} streams" if self.streams > 1 else ""
        return f"{self.engine}{mode} {self.precision} {self.memory_format} x{self.sw_batch_size}{streams}"


class Outcome(StrEnum):
    """What came of a configuration that was considered. Slower: it ran, and another one was faster."""

    CHOSEN = "chosen"
    RUNS = "runs"
    SLOWER = "slower"
    SKIPPED = "skipped"
    WRONG = "wrong"
    FAILED = "failed"


class Verdict(NamedTuple):
    """An outcome, and the reason for it in words. In JSON it is the text that `str` returns."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        if self.outcome is Outcome.SLOWER:
            return self.detail
        return f"{self.outcome}: {self.detail}" if self.detail else str(self.outcome)

    @classmethod
    def parse(cls, text: object) -> Self:
        """Invert `str`. Raises ValueError for anything but a text or a verdict."""
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise ValueError(f"A verdict is a text, not {text!r}.")  # noqa: TRY004 - pydantic expects it
        outcome, _, detail = text.partition(": ")
        is_plain = outcome in set(Outcome) - {Outcome.SLOWER}
        return cls(Outcome(outcome), detail) if is_plain else cls(Outcome.SLOWER, text)


@dataclass(frozen=True)
class Trial:
    """The outcome for a configuration that was considered.

    verdict             chosen, or why not
    windows_per_second  None where it was not run
    difference          share of the sample's voxels whose label differs from that of the eager FP32 network
    build_seconds       converting, compiling and the first calls; None where it did not run
    """

    choice: EngineConfig
    verdict: Annotated[Verdict, PlainValidator(Verdict.parse), PlainSerializer(str), WithJsonSchema({"type": "string"})]
    windows_per_second: float | None = None
    difference: float | None = None
    build_seconds: float | None = None


@dataclass(frozen=True)
class EnginePlan:
    """The configuration chosen for one model on one machine, the trials that led to it, and what it holds for.

    seconds         that the trials took
    circumstances   model, hardware, versions and settings; another value of any of them needs another plan
    tuned           whether it won a race, or is the first of the known order that gave the right labels
    """

    model: str
    choice: EngineConfig
    trials: tuple[Trial, ...]
    seconds: float
    circumstances: dict[str, str]
    tuned: bool = False

    @property
    def origin(self) -> str:
        """How the configuration was chosen: tuned, or known-order."""
        return "tuned" if self.tuned else "known-order"

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table: what was chosen, then the others, the fastest first."""
        where = self.circumstances.get("device", "another device")
        if "threads" in self.circumstances:
            where += f", {self.circumstances['threads']} threads"
        yield f"{'tuned' if self.tuned else 'checked'} in {self.seconds:.0f} s on {where}:"
        width = max((len(str(trial.choice)) for trial in self.trials), default=0)
        for trial in sorted(
            self.trials, key=lambda trial: (trial.choice != self.choice, -(trial.windows_per_second or 0))
        ):
            rate = "" if trial.windows_per_second is None else f"{trial.windows_per_second:.1f} windows/s"
            share = "" if trial.difference is None else f"{trial.difference:.3%} differ"
            built = "" if trial.build_seconds is None else f"built in {trial.build_seconds:.1f} s"
            yield f"{trial.choice!s:{width}} {rate:>17} {share:>14} {built:>16}  {trial.verdict}"


_ADAPTER = TypeAdapter(EnginePlan)


def choose_folder(configured: Path | None) -> Path:
    """Return the folder of plans: in `engine.cache_folder`, else below the user's own cache folder."""
    if configured is not None:
        return configured / FOLDER
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(caches) / "stackseg" / FOLDER


@cache
def digest_sources(*folders: Path) -> str:
    """Hash the sources of engines and those in `folders`; after an update in place another plan may be better."""
    files = (file for folder in (Path(__file__).parents[1], *folders) for file in sorted(folder.rglob("*")))
    sources = (file.read_bytes() for file in files if file.suffix in {".py", ".cpp", ".hpp"})
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def find(folder: Path, model: str, circumstances: Mapping[str, str]) -> EnginePlan | None:
    """Return the plan that was made for exactly these circumstances; None if there is none that can be read."""
    plan = _read(folder / _file_name(model, circumstances))
    return plan if plan is not None and plan.circumstances == dict(circumstances) else None


def find_all(folder: Path, model: str, weights: str) -> tuple[EnginePlan, ...]:
    """Return all plans saved for a model with these weights (SHA-256), the newest first."""
    files = sorted(folder.glob(f"{model}-*.json"), key=_modified, reverse=True)
    plans = (plan for plan in map(_read, files) if plan is not None)
    return tuple(plan for plan in plans if plan.model == model and plan.circumstances.get("weights") == weights)


def save(folder: Path, plan: EnginePlan) -> None:
    """Write a plan where `find` looks for it, at once or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_ADAPTER.dump_json(plan, indent=1))
        Path(name).replace(folder / _file_name(plan.model, plan.circumstances))
    finally:
        Path(name).unlink(missing_ok=True)


def _modified(file: Path) -> float:
    """Return the time of the last change; 0 for a file that another process has deleted meanwhile."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> EnginePlan | None:
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _file_name(model: str, circumstances: Mapping[str, str]) -> str:
    text = json.dumps(dict(circumstances), sort_keys=True)
    return f"{model}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
