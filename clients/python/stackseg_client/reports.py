"""Descriptions of files, jobs and models. `raw` has all members of the server's JSON.

Members that other versions of the server add are only in `raw`. Optional members may be missing in older versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stackseg_client.errors import InvalidResponse
from stackseg_client.results import VoxelSize

T = TypeVar("T")

FINAL_STATES = frozenset({"done", "failed", "cancelled", "expired"})


@dataclass(frozen=True)
class JobReport:
    """State and progress of a job.

    state         `loading`, `waiting`, `running`, `done`, `failed`, `cancelled` or `expired`
    stage         current stage of a running job
    position      position in the queue; 1 is next
    done, total   completed and total windows, or stacks of a folder
    seconds_left  estimated time until the result is ready; None if unknown
    warnings      messages about the result
    problem       why the job failed; None if it did not fail
    """

    id: str
    state: str
    model: str
    name: str
    stage: str | None
    position: int | None
    done: int
    total: int
    seconds_left: float | None
    objects: int | None
    warnings: list[str]
    problem: str | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.state in FINAL_STATES

    @property
    def fraction(self) -> float:
        """Completed fraction of the work, 0 to 1."""
        return self.done / self.total if self.total else float(self.has_ended)


@dataclass(frozen=True)
class Inspection:
    """Description of a file, and estimate of the work, without a segmentation.

    axes        axes of the stored array, and its `stored_shape`
    shape       channels, Z, Y, X of the part that would be segmented
    voxel_size  Z, Y and X in micrometers; None if unknown
    notes       assumptions about the file
    windows     number of windows; None if the request would fail
    seconds     estimated time until the result is ready; None if unknown
    problem     why `segment()` would fail; None if it would not
    """

    axes: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: str
    voxel_size: VoxelSize | None
    channels: list[str]
    time_points: int
    notes: list[str]
    windows: int | None
    seconds: float | None
    problem: str | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Model:
    """A model of the server. `problem` says why it cannot be used, if it cannot."""

    name: str
    version: str | None
    summary: str | None
    state: str
    is_default: bool
    outputs: list[str]
    licence: str | None
    training_data: str | None
    problem: str | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Stack:
    """An uploaded stack: `client.segment(stack=stack.id)`."""

    id: str
    name: str
    nbytes: int


class ContentReceiver(Generic[T]):
    """Receives a response in memory, and converts its content with `parse`. Raises InvalidResponse if that fails."""

    def __init__(self, parse: Callable[[bytearray], T]) -> None:
        self._parse, self._content = parse, bytearray()

    def write(self, block: bytes) -> None:
        """Add a block of the response."""
        self._content += block

    def finish(self) -> T:
        """Return the converted content."""
        try:
            return self._parse(self._content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            quoted = bytes(self._content[:200]).decode("utf-8", "replace")
            raise InvalidResponse(f"This is not a response of a StackSeg server: {quoted}") from error

    def close(self) -> None:
        """Nothing to release."""


class EventParser:
    """Parses server-sent events with reports of a job."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> list[JobReport]:
        """Return the reports of all events that this block completes. Raises InvalidResponse."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        try:
            return [parse_job(json.loads(line[5:])) for line in lines if line.startswith(b"data:")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidResponse(f"These are not events of a StackSeg server: {block[:200]!r}") from error


def parse_planes(content: bytearray, headers: Mapping[str, str]) -> NDArray[Any]:
    """Return the voxels of a part of a volume, in the order Z, Y, X."""
    shape = [int(length) for length in headers["X-StackSeg-Shape"].split(",")]
    return np.frombuffer(content, np.dtype(headers["X-StackSeg-Dtype"]).newbyteorder("<")).reshape(shape)


def parse_job(raw: dict[str, Any]) -> JobReport:
    """Parse the report of a job."""
    optional = ("stage", "position", "seconds_left", "objects")
    progress, problem = raw.get("progress") or {}, raw.get("problem")
    return JobReport(
        **{name: raw.get(name) for name in optional},
        id=raw["id"],
        state=raw["state"],
        model=raw.get("model", ""),
        name=raw.get("name", ""),
        warnings=raw.get("warnings", []),
        done=progress.get("done", 0),
        total=progress.get("total", 0),
        problem=problem and problem["detail"],
        raw=raw,
    )


def parse_inspection(raw: dict[str, Any]) -> Inspection:
    """Parse the response of `/inspect`."""
    file, estimate, size = raw["file"], raw.get("estimate") or {}, raw["file"].get("voxel_size")
    return Inspection(
        axes=file["axes"],
        stored_shape=tuple(file["stored_shape"]),
        shape=tuple(file["shape"]) if file.get("shape") else None,
        dtype=file["dtype"],
        voxel_size=(size["z"], size["y"], size["x"]) if size else None,
        channels=file.get("channels", []),
        time_points=file.get("times", 1),
        notes=file.get("notes", []),
        windows=estimate.get("windows"),
        seconds=raw.get("seconds"),
        problem=raw.get("problem") or file.get("problem") or None,
        raw=raw,
    )


def parse_models(raw: dict[str, Any]) -> list[Model]:
    """Parse the list of models."""
    optional = ("version", "summary", "licence", "training_data", "problem")
    return [
        Model(
            **{name: model.get(name) for name in optional},
            name=model["name"],
            state=model["state"],
            outputs=model.get("outputs", []),
            is_default=model["name"] == raw.get("default"),
            raw=model,
        )
        for model in raw["models"]
    ]


def parse_stack(raw: dict[str, Any]) -> Stack:
    """Parse the description of an uploaded stack."""
    return Stack(raw["id"], raw["name"], raw["bytes"])
