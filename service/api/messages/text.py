"""Strings in responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from service.core.errors import remove_host_details

# String that may contain an error message. The folders are removed from paths on the host.
RedactedText = Annotated[str, AfterValidator(remove_host_details)]
