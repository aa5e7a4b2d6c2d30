from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from service.api.requests.body import work_folder
from service.core.errors import Cancelled, OutOfStorage


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "expected"), [(Cancelled("gone"), Cancelled), (OSError(errno.ENOSPC, "full"), OutOfStorage)]
)
async def test_work_folder_is_deleted_after_an_error(tmp_path: Any, error: Exception, expected: Any) -> None:
    scratch: Any = SimpleNamespace(get_next_request_folder=lambda: tmp_path / "request")

    async def use() -> None:
        async with work_folder(scratch) as folder:
            folder.mkdir()
            (folder / "upload.tif").touch()
            raise error

    with pytest.raises(expected):
        await use()
    assert list(tmp_path.iterdir()) == []
