from __future__ import annotations

import errno

import pytest

from service.core.errors import OutOfStorage
from service.serving.storage.disk import translate_disk_faults


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_out_of_storage(number: int) -> None:
    with pytest.raises(OutOfStorage), translate_disk_faults():
        raise OSError(number, "full")


def test_other_errors_of_the_disk_stay_what_they_are() -> None:
    with pytest.raises(PermissionError), translate_disk_faults():
        raise PermissionError(errno.EACCES, "denied")
