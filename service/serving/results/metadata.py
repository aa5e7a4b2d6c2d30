"""The metadata of an answer, as response headers, the job store and the result cache hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.core.quantities import VoxelSize
from service.core.types import OutputKind


@dataclass(frozen=True)
class AnswerMetadata:
    """The data beside the file of an answer. `model` has the version; `seconds` are by stage.

    diameter  of the objects, and whether it was stated or estimated; None if it was neither
    skipped   how many windows were not computed because they are empty; None if none were looked for
    time_points  of a series: how many are in the answer, and how many there should be
    stacks    of a folder: how many have results, and how many there are
    confidence  in the result, 0 to 1; None where that is not known
    doubt     why the result is not to be trusted, as `describe_doubt` has it; None: it may be
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
