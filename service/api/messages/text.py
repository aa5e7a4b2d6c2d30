"""Text for callers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from service.core.errors import without_folders

# What may quote an error with paths of the host.
Text = Annotated[str, AfterValidator(without_folders)]
