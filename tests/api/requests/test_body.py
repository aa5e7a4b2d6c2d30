from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from service.api.requests.body import work_folder
from service.core.errors import Cancelled, OutOfStorage


class Folders:
    """A scratch folder, as far as a work folder needs one."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def next_request_folder(self) -> Any:
        return self.root / "request"


def test_work_folder_goes_in_the_end_whatever_happens(tmp_path: Any) -> None:
    async def use(error: Exception) -> None:
        async with work_folder(Folders(tmp_path)) as folder:
            folder.mkdir()
            (folder / "upload.tif").touch()
            raise error

    with pytest.raises(Cancelled):
        asyncio.run(use(Cancelled("gone")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutOfStorage):
        asyncio.run(use(OSError(errno.ENOSPC, "full")))
    assert list(tmp_path.iterdir()) == []
