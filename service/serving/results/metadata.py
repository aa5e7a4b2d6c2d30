"""The metadata of a result, which is sent in headers, and stored in the job database and the result cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.core.quantities import VoxelSize
from service.core.types import OutputKind

# Suffixes of all formats that can be read, in lower case.
STACK_SUFFIXES = (
    *(".tif", ".tiff", ".tf2", ".tf8", ".btf"),
    *(".lsm", ".stk"),
    *(".czi", ".nd2", ".lif", ".oib", ".oif.zip", ".ims"),
    *(".zarr", ".zarr.zip", ".ozx", ".zip"),
)
_OME_SUFFIXES = tuple(f".ome{suffix}" for suffix in STACK_SUFFIXES)


@dataclass(frozen=True)
class ResultMetadata:
    """The metadata of a result. The field names are stored, so renaming a field would break stored jobs.

    model        name and version of the model
    seconds      duration of each stage
    notes        warnings and notes for the user
    objects      number of objects; None if the output has no objects
    diameter     object diameter, and whether the diameter was specified or estimated; None if neither
    skipped      description of the empty windows that were skipped; None if skipping was disabled
    time_points  for a series: number of time points in the result, and number of time points in the request
    stacks       for a folder: number of stacks with results, and number of all stacks
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


def has_stack_suffix(name: str) -> bool:
    """Return whether a file name has the suffix of a format that can be read, in upper or lower case."""
    return name.lower().endswith(STACK_SUFFIXES)


def make_answer_name(name: str, suffix: str) -> str:
    """Name a result file after its input: `embryo.ome.tif` -> `embryo_labels.ome.tif`."""
    lengths = (len(ending) for ending in (*_OME_SUFFIXES, *STACK_SUFFIXES) if name.lower().endswith(ending))
    return (name[: len(name) - max(lengths, default=0)] or "stack") + suffix
