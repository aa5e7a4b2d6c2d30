"""Tests of recognizing single files with weights."""

import zipfile
from pathlib import Path

import pytest
import torch

from service.models.importers.single_file import is_supported


@pytest.mark.parametrize("is_zip", [True, False])
def test_checkpoints_are_recognized_by_their_content(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "net.chkpt"
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=is_zip)
    assert is_supported(path)
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr("model/tensors/data.pkl", b"")
    path.write_bytes(path.read_bytes()[: 5 if is_zip else 3])
    assert not is_supported(path)
    assert not is_supported(tmp_path / "package.zip")
