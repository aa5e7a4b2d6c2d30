"""Select the stacks among the files and OME-Zarr folders in a folder, and name and measure them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path, PurePath

from service.core.errors import BadParameter
from service.formats.zarr.store import METADATA_NAMES
from service.serving.results.metadata import has_stack_suffix, make_answer_name

# Files and folders that file managers and file servers create.
_SYSTEM_NAMES = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))
# The beginning of a file, or of a metadata file of an OME-Zarr folder, that is searched for signatures.
_HEAD_BYTES = 2**12
_MAX_METADATA_BYTES = 2**20
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ZIP_SIGNATURE = b"PK\x03\x04"
# At least one of the first names in a zip archive of an OME-Zarr image or of an OIF contains one of these words.
_ARCHIVED_STACK_NAMES = (b".oif", b".zarr/", *(name.encode() for name in METADATA_NAMES))
# The Software tag of a written TIFF, and the description for ImageJ, which images that are not results lack.
_TIFF_RESULT_WORDS = (b"StackSeg\0", b"ImageJ=")
_ZARR_RESULT_WORD = b"stackseg/origin"
# Metadata of an OME-Zarr with labels. In an .ozx file, which begins with the metadata, it is not compressed.
_ZARR_LABELS_WORD = b'"image-label"'


def select_stacks(
    names: Iterable[str], glob: str | None, open_stack: Callable[[str], AbstractContextManager[Path]]
) -> list[str]:
    """Return the sorted names of the stacks among the files and OME-Zarr folders that match a pattern.

    With a pattern, all matching files are stacks, otherwise the files with a known suffix or the content of a TIFF or
    of an OME-Zarr image. Hidden files, files of operating systems and results of this software are never stacks.

    open_stack  context manager that opens a file or folder by name; a file that it cannot open is a stack according to
                its name, so that the run reports the problem

    Raises BadParameter if several stacks would have the same result file.
    """
    visible_names = sorted(name for name in names if not _is_system_file(name))
    stacks = [name for name in visible_names if _is_stack(name, glob, open_stack)]
    names_by_stem = dict[str, str]()
    for name in stacks:
        stem = get_result_stem(name)
        if stem in names_by_stem:
            raise BadParameter(
                f"{names_by_stem[stem]} and {name} would have result files with the same name, {stem}. Rename one of"
                " these stacks, or select stacks with a pattern."
            )
        names_by_stem[stem] = name
    return stacks


def get_result_stem(name: str) -> str:
    """Return the path of a stack without its suffix. The paths of all results of the stack begin with this stem."""
    return str(Path(name).with_name(make_answer_name(Path(name).name, "")))


def measure_stack(stack: Path) -> tuple[int, int]:
    """Return the size of a file or OME-Zarr folder in bytes, and the latest modification time in nanoseconds.

    Raises OSError.
    """
    status = stack.stat()
    if not stack.is_dir():
        return status.st_size, status.st_mtime_ns
    statuses = [(Path(folder) / name).lstat() for folder, _, names in os.walk(stack) for name in names]
    return sum(status.st_size for status in statuses), max(status.st_mtime_ns for status in (status, *statuses))


def _is_system_file(name: str) -> bool:
    return any(part.startswith(".") or part.lower() in _SYSTEM_NAMES for part in PurePath(name).parts)


def _is_stack(name: str, glob: str | None, open_stack: Callable[[str], AbstractContextManager[Path]]) -> bool:
    try:
        with open_stack(name) as path:
            if path.is_dir():
                return not _is_zarr_result(path)
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except (OSError, BadParameter):
        return glob is not None or has_stack_suffix(name)
    if head.startswith(_TIFF_SIGNATURES):
        return not all(word in head for word in _TIFF_RESULT_WORDS)
    if head.startswith(_ZIP_SIGNATURE):
        return _ZARR_LABELS_WORD not in head and (glob is not None or _is_archived_stack(name, head))
    return glob is not None or has_stack_suffix(name)


def _is_archived_stack(name: str, head: bytes) -> bool:
    # Archives with the suffix .zip often contain something else, such as the regions of interest of ImageJ.
    is_other_archive = name.lower().endswith(".zip") or not has_stack_suffix(name)
    return not is_other_archive or any(word in head for word in _ARCHIVED_STACK_NAMES)


def _is_zarr_result(folder: Path) -> bool:
    """Return whether the metadata of an OME-Zarr folder contains the provenance of a result."""
    for name in ("zarr.json", ".zattrs"):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                return _ZARR_RESULT_WORD in file.read(_MAX_METADATA_BYTES)
    return False
