"""Files in which results are saved: their formats and names, and how they differ from stacks."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

SavePath = str | os.PathLike[str]

TIFF_MEDIA_TYPE = "image/tiff"
# Media type that the server sends, by suffix of the file in which a result is saved.
MEDIA_TYPES = {
    ".tif": TIFF_MEDIA_TYPE,
    ".tiff": TIFF_MEDIA_TYPE,
    ".npy": TIFF_MEDIA_TYPE,
    ".nii.gz": "application/x-nifti",
    ".ozx": "application/x-ozx",
}
# Longest file name of most file systems.
MAX_NAME_BYTES = 255
# Words at the beginning of a result, by which a result is distinguished from a stack.
_HEAD_BYTES = 2**16
_TIFF_RESULT_WORDS, _ZARR_RESULT_WORD = (b"StackSeg\0", b"ImageJ="), b"stackseg/origin"
# Metadata of an OME-Zarr with labels. In an `.ozx` file, which begins with the metadata, it is not compressed.
_ZIP_SIGNATURE, _ZARR_LABELS_WORD = b"PK\3\4", b'"image-label"'


def open_part(path: Path) -> tuple[Path, BinaryIO]:
    """Create and open a file with a unique name in the folder of `path`, which it replaces when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not derived from the name, which may be as long as file systems allow.
    part = path.with_name(f".stackseg-{uuid.uuid4().hex}")
    return part, part.open("xb")


def check_path(path: Path, stack: Path | None = None) -> None:
    """Check before the computation that a result can be written to `path`, and does not replace the file of the stack.

    Raises ValueError if it would, or if the name is too long; IsADirectoryError and NotADirectoryError if a folder or a
    file is in its place; and PermissionError.
    """
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise ValueError(f"The name {path.name[:20]}... is too long. Use at most {MAX_NAME_BYTES} bytes.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Specify the name of a file.")
    if stack is not None and path.exists() and stack.exists() and path.samefile(stack):
        raise ValueError(f"{path} would replace the stack. Choose another name for the result.")
    _check_folder(path)


def _check_folder(path: Path) -> None:
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written, because {folder} is a file. Choose another folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written, because {folder} is read-only. Choose another folder.")


@dataclass(frozen=True)
class SavedFile:
    """A file with a result. The name may be that of another result later, and the working directory may change.

    path  absolute path
    """

    path: Path
    nbytes: int
    modified_ns: int

    @classmethod
    def identify(cls, path: Path) -> Self:
        """Return the file that has this path now."""
        status = path.stat()
        return cls(path.absolute(), status.st_size, status.st_mtime_ns)

    def check(self) -> Path:
        """Return the path. Raises ValueError if the file was changed or replaced, and OSError if it was deleted."""
        if self.identify(self.path) != self:
            raise ValueError(
                f"{self.path} was changed after this result had been saved, perhaps by another result with the same"
                " name. Read the file itself, or save each result in its own file."
            )
        return self.path


def get_table_path(path: Path) -> Path:
    """Return the file of the table that belongs to a file with labels."""
    stem = path.name[: -len(get_suffix(path))].removesuffix(".ome")
    return path.with_name(f"{stem}.csv")


def is_result(path: Path) -> bool:
    """Return whether a file or folder is a TIFF or an OME-Zarr that StackSeg has written, or an `.ozx` with labels."""
    if path.is_dir():
        return any(_ZARR_RESULT_WORD in _read_head(path / name) for name in ("zarr.json", ".zattrs"))
    head = _read_head(path)
    if head.startswith(_ZIP_SIGNATURE):
        return _ZARR_LABELS_WORD in head
    return all(word in head for word in _TIFF_RESULT_WORDS)


def _read_head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def get_suffix(path: Path) -> str:
    """Return the suffix of a file for labels. Raises ValueError if the format is not supported."""
    for suffix in MEDIA_TYPES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise ValueError(f"{path} must end in one of {', '.join(MEDIA_TYPES)}.")
