from __future__ import annotations

import errno

import pytest

from service.core.errors import OutOfStorage, StorageUnavailable
from service.serving.storage.disk import translate_disk_errors


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, OutOfStorage),
        (errno.EDQUOT, OutOfStorage),
        (errno.EIO, StorageUnavailable),
        (errno.EACCES, PermissionError),
    ],
)
def test_only_disk_errors_are_translated(number: int, expected: type[Exception]) -> None:
    with pytest.raises(expected), translate_disk_errors():
        raise OSError(number, "faulty")
