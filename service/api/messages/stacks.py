"""Responses about stacks: inspected files and stored stacks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.api.messages.text import Text
from service.core.types import Description, OutputKind
from service.inference.types import Estimate


class Inspection(BaseModel):
    """Metadata of a file, and an estimate of the work to segment it.

    - `diameter`: the object diameter that would be used, `none`, or `auto` if it is estimated from the pixels. With
      `auto`, `estimate` is for the stack at its original resolution.
    - `seconds`: estimated time until the labels are ready, including the queue. It is based on earlier requests and is
      null until the model has segmented a stack.
    - `problem`: why the file cannot be segmented, and what to do; null if it can.
    """

    file: Description
    model: str
    output: OutputKind | None
    normalisation: dict[str, Any]
    diameter: str | None
    estimate: Estimate | None
    seconds: float | None
    problem: Text | None


class StackReport(BaseModel):
    """A stack stored for later requests. `bytes` is the size of its file."""

    id: str
    name: str
    bytes: int
