"""The metadata of an answer. It is sent in headers, and stored in the job database and the result cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.core.quantities import VoxelSize
from service.core.types import OutputKind


@dataclass(frozen=True)
class AnswerMetadata:
    """The metadata of the file of an answer.

    model        name and version of the model
    seconds      duration of each stage
    diameter     object diameter, and whether the diameter was specified or estimated; None if neither
    skipped      number of empty windows that were skipped; None if the windows were not checked
    time_points  for a series: number of time points in the answer, and total number
    stacks       for a folder: number of stacks with results, and total number
    confidence   confidence in the result, 0 to 1; None if unknown
    doubt        the low-confidence warning of `describe_low_confidence`; None if confidence is not low
    """

    model: str
    media_type: str
    file_name: str
    kind: OutputKind
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    objects: int | None = None
    voxel_size: VoxelSize | None = None
    diameter: str | None = None
    skipped: str | None = None
    time_points: tuple[int, int] | None = None
    confidence: float | None = None
    doubt: dict[str, Any] | None = None
    stacks: tuple[int, int] | None = None
