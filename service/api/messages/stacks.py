"""Responses about stacks: inspected files and uploaded stacks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.api.messages.text import RedactedText
from service.core.types import Description, OutputKind
from service.inference.types import ResourceEstimate


class Inspection(BaseModel):
    """Metadata of a file, and an estimate of the resources that its segmentation requires.

    - `file`: metadata of the file.
    - `output`: type of the result: `labels`, `classes` or `probabilities`.
    - `normalisation`: how the model normalizes the pixel values; a list if the channels differ.
    - `diameter`: object diameter that would be used, `none`, or `auto` if it would be estimated from the pixels.
    - `estimate`: estimated number of windows and amount of memory; null if they cannot be estimated. If `diameter` is
      `auto`, the estimate applies to the stack at its original resolution.
    - `seconds`: estimated time in seconds until the labels are ready, including the time in the queue. The estimate is
      based on earlier requests, and is null until the model has segmented a stack.
    - `problem`: why the file cannot be segmented, and what to do; null if it can be segmented.
    """

    file: Description
    model: str
    output: OutputKind | None
    normalisation: dict[str, Any] | list[dict[str, Any]]
    diameter: str | None
    estimate: ResourceEstimate | None
    seconds: float | None
    problem: RedactedText | None


class StackReport(BaseModel):
    """An uploaded stack, stored for later requests. `bytes` is the size of its file."""

    id: str
    name: str
    bytes: int
