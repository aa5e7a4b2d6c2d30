"""Answers about stacks: what was found in a file, and what is kept."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.api.messages.text import Text
from service.core.types import Description, OutputKind
from service.inference.types import Estimate


class Inspection(BaseModel):
    """Facts about a file, and what segmenting it would take. `problem`: why it would be refused.

    diameter  of the objects: as stated, none, or auto where it is estimated once pixels are read; `estimate` then is
              that of the stack as it is sampled
    seconds   until the labels would be there, by the pace of earlier requests and with those before it; null before the
              model has segmented anything
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
    """A stack that is kept for later requests; `bytes` of its file."""

    id: str
    name: str
    bytes: int
