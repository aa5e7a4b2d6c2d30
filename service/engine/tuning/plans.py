"""Engine configurations, their trials, and the plan files that store the results. This module does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import Field, PlainSerializer, PlainValidator, PositiveInt, TypeAdapter, ValidationError, WithJsonSchema

from service.core.sections.computing import MAX_STREAMS

FOLDER_NAME = "plans"
# Plans that were not used for this time are deleted when another one is saved.
MAX_UNUSED_SECONDS = 90 * 24 * 3600


@dataclass(frozen=True)
class EngineConfig:
    """An engine and its options for running a network.

    engine         value of `engine.kind` other than auto
    precision      bf16, fp16 or fp32
    memory_format  contiguous or channels_last_3d
    sw_batch_size  number of windows per call
    compile_mode   mode of torch.compile, or None if not compiled
    streams        number of batches that run concurrently; on a CPU, each stream has a share of the cores
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
    """The result of trying a configuration. SLOWER means that it ran, but another configuration was faster."""

    CHOSEN = "chosen"
    RUNS = "runs"
    SLOWER = "slower"
    SKIPPED = "skipped"
    WRONG = "wrong"
    FAILED = "failed"


class Verdict(NamedTuple):
    """An outcome and the reason for it, serialized to JSON as the string that `str` returns."""

    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        if self.outcome is Outcome.SLOWER:
            return self.detail
        return f"{self.outcome}: {self.detail}" if self.detail else str(self.outcome)

    @classmethod
    def parse(cls, string: object) -> Self:
        """Parse the string that `str` returns. Raises ValueError for other types."""
        if isinstance(string, cls):
            return string
        if not isinstance(string, str):
            raise ValueError(f"A verdict must be a string, not {string!r}.")  # noqa: TRY004 - pydantic expects it
        outcome, _, detail = string.partition(": ")
        has_outcome_prefix = outcome in set(Outcome) - {Outcome.SLOWER}
        return cls(Outcome(outcome), detail) if has_outcome_prefix else cls(Outcome.SLOWER, string)


@dataclass(frozen=True)
class Trial:
    """A configuration that was considered, and the result of the trial.

    verdict             outcome, with the reason if it was not chosen
    windows_per_second  speed, or None if it was not measured
    difference          fraction of the sample's voxels whose label differs from that of the eager FP32 network
    build_seconds       time for conversion, compilation and warm-up calls, or None if these did not succeed
    """

    choice: EngineConfig
    verdict: Annotated[Verdict, PlainValidator(Verdict.parse), PlainSerializer(str), WithJsonSchema({"type": "string"})]
    windows_per_second: float | None = None
    difference: float | None = None
    build_seconds: float | None = None


@dataclass(frozen=True)
class EnginePlan:
    """The configuration chosen for one model on one machine, and the trials that led to it.

    seconds         duration of the trials
    circumstances   model, hardware, versions and settings for which the plan is valid; any change requires a new plan
    tuned           True if the configuration was the fastest of several; False if it was the first one in the
                    default order that gave correct labels
    """

    model: str
    choice: EngineConfig
    trials: tuple[Trial, ...]
    seconds: float
    circumstances: dict[str, str]
    tuned: bool = False

    @property
    def selection_method(self) -> str:
        """How the configuration was chosen: `tuned`, or `known-order` if it was the first with correct labels."""
        return "tuned" if self.tuned else "known-order"

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of a table: the chosen configuration, then the other configurations, the fastest first."""
        location = self.circumstances.get("device", "an unknown device")
        if "threads" in self.circumstances:
            location += f", {self.circumstances['threads']} threads"
        yield f"{'tuned' if self.tuned else 'checked'} in {self.seconds:.0f} s on {location}:"
        width = max((len(str(trial.choice)) for trial in self.trials), default=0)
        for trial in sorted(
            self.trials, key=lambda trial: (trial.choice != self.choice, -(trial.windows_per_second or 0))
        ):
            speed_text = "" if trial.windows_per_second is None else f"{trial.windows_per_second:.1f} windows/s"
            difference_text = "" if trial.difference is None else f"{trial.difference:.3%} differ"
            build_text = "" if trial.build_seconds is None else f"built in {trial.build_seconds:.1f} s"
            yield f"{trial.choice!s:{width}} {speed_text:>17} {difference_text:>14} {build_text:>16}  {trial.verdict}"


_ADAPTER = TypeAdapter(EnginePlan)


def resolve_folder(cache_folder: Path | None) -> Path:
    """Return the folder of plan files: in `engine.cache_folder` if it is set, otherwise in the user's cache folder.

    If the user has no home directory, return a path that cannot exist. In the current folder or the temporary folder,
    other users could replace the plans.
    """
    if cache_folder is not None:
        return cache_folder / FOLDER_NAME
    try:
        user_cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:
        user_cache_folder = Path(os.devnull)
    return user_cache_folder / "stackseg" / FOLDER_NAME


@cache
def hash_sources(*folders: Path) -> str:
    """Hash the source files of the engines and of `folders`, so that plans become invalid when the code changes."""
    files = (file for folder in (Path(__file__).parents[1], *folders) for file in sorted(folder.rglob("*")))
    sources = (file.read_bytes() for file in files if file.suffix in {".py", ".cpp", ".hpp"})
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def find(folder: Path, model: str, circumstances: Mapping[str, str]) -> EnginePlan | None:
    """Return the plan for exactly these circumstances, or None if there is no readable plan."""
    file = folder / _make_file_name(model, circumstances)
    plan = _read(file)
    if plan is None or plan.circumstances != dict(circumstances):
        return None
    # `save` finds unused plans by their modification time.
    with suppress(OSError):
        os.utime(file)
    return plan


def find_all(folder: Path, model: str, weights_hash: str) -> tuple[EnginePlan, ...]:
    """Return all saved plans for a model whose weights have this SHA-256 hash, the most recently used first."""
    files = sorted(folder.glob(f"{model}-*.json"), key=_get_modification_time, reverse=True)
    plans = (plan for plan in map(_read, files) if plan is not None)
    return tuple(plan for plan in plans if plan.model == model and plan.circumstances.get("weights") == weights_hash)


def save(folder: Path, plan: EnginePlan) -> None:
    """Write a plan atomically to the file that `find` reads, and delete unused plans. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary_name = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_ADAPTER.dump_json(plan, indent=1))
        Path(temporary_name).replace(folder / _make_file_name(plan.model, plan.circumstances))
    finally:
        Path(temporary_name).unlink(missing_ok=True)
    for path in folder.glob("*.json"):
        if time.time() - _get_modification_time(path) > MAX_UNUSED_SECONDS:
            with suppress(OSError):
                path.unlink()


def _get_modification_time(file: Path) -> float:
    """Return the modification time of a file, or 0 if another process has deleted it in the meantime."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> EnginePlan | None:
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _make_file_name(model: str, circumstances: Mapping[str, str]) -> str:
    encoded_circumstances = json.dumps(dict(circumstances), sort_keys=True)
    return f"{model}-{hashlib.sha256(encoded_circumstances.encode()).hexdigest()[:24]}.json"
