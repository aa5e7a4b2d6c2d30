"""Type of strings in responses that may contain paths on the host."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from service.core.errors import remove_host_details

# String that may contain an error message. Paths on the host are reduced to file names.
RedactedText = Annotated[str, AfterValidator(remove_host_details)]
