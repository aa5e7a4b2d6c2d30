"""Text in responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from service.core.errors import remove_folders

# Text that may contain an error message. Folders of the host are removed from paths in it.
Text = Annotated[str, AfterValidator(remove_folders)]
