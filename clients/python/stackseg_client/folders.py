"""Folders of stacks: which files are segmented, and where their labels are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stackseg_client.bodies import is_zarr
from stackseg_client.errors import ProblemError
from stackseg_client.result_files import MEDIA_TYPES, SavePath, get_table_path, is_result
from stackseg_client.results import Result

# Suffixes of files that the server reads.
STACK_SUFFIXES = (
    *(".tif", ".tiff", ".tf2", ".tf8", ".btf"),
    *(".lsm", ".stk", ".czi", ".nd2", ".lif", ".oib", ".oif.zip", ".ims"),
    *(".zarr.zip", ".ozx", ".zip"),
)


@dataclass(frozen=True)
class FolderItem:
    """What became of one stack of a folder.

    path         the stack
    labels_path  the file with its labels
    result       None if the labels existed already, or if the stack was refused
    error        why the server refused the stack; None if it did not
    done, total  number of stacks that are finished, including this one, and number of all stacks
    """

    path: Path
    labels_path: Path
    result: Result | None = None
    error: ProblemError | None = None
    done: int = 0
    total: int = 0


class FolderRun(Iterator[FolderItem]):
    """The stacks of a folder, each when it is finished. Its length is their number, for programs that show progress."""

    def __init__(self, items: Iterator[FolderItem], total: int) -> None:
        self._items, self._total = items, total

    def __len__(self) -> int:
        return self._total

    def __next__(self) -> FolderItem:
        return next(self._items)


def check_concurrency(concurrency: int) -> None:
    """Raise ValueError if no stack could be in progress."""
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency} segments no stack. Use 1 or more.")


def plan_folder(
    folder: SavePath,
    labels_folder: SavePath,
    pattern: str,
    suffix: str,
    *,
    table: bool = False,
    overwrite: bool = False,
) -> list[FolderItem]:
    """Return the stacks in a folder that match a glob pattern, and the files for their labels, in the order of names.

    Stacks are files with a known suffix and folders of OME-Zarr. Hidden files and results of StackSeg are not stacks.

    Raises NotADirectoryError if there is no such folder, FileNotFoundError for a broken link, and ValueError if no
    stacks are found, if the labels would be in the same folder, if two stacks would have the same file for their
    labels, or if stacks have labels but not the `table`, unless the labels are replaced.
    """
    source, target = Path(folder).expanduser(), Path(labels_folder).expanduser()
    _check_arguments(source, target, suffix)
    results = target.resolve() if source.resolve() in target.resolve().parents else None
    paths = [path for path in _list_stacks(source, pattern) if results not in path.resolve().parents]
    if not paths:
        raise ValueError(f"{source} has no stacks that match {pattern!r}.")
    items = [FolderItem(path, target / _name_labels(path.relative_to(source), suffix)) for path in paths]
    _check_names(items)
    if table and not overwrite:
        _check_tables(items)
    return items


def _check_arguments(source: Path, target: Path, suffix: str) -> None:
    if not source.is_dir():
        raise NotADirectoryError(f"{source} is not a folder. Check its path, or use segment() for a single stack.")
    if source.resolve() == target.resolve():
        raise ValueError(f"{target} contains the stacks. Choose another folder for the labels.")
    if suffix not in MEDIA_TYPES:
        raise ValueError(f"suffix={suffix!r} is not supported. Choose one of {', '.join(MEDIA_TYPES)}.")


def _list_stacks(source: Path, pattern: str) -> list[Path]:
    """Return the stacks in a folder, without the files and folders inside of stacks. Raises FileNotFoundError."""
    stacks: list[Path] = []
    folders: set[Path] = set()
    for path in sorted(source.glob(pattern)):
        is_hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if is_hidden or not folders.isdisjoint(path.parents):
            continue
        is_folder = path.is_dir()
        if not (is_zarr(path) if is_folder else path.name.lower().endswith(STACK_SUFFIXES)):
            continue
        if not path.exists():
            raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which does not exist. Delete it.")
        if not is_result(path):
            stacks.append(path)
        if is_folder:
            folders.add(path)
    return stacks


def _check_tables(items: list[FolderItem]) -> None:
    for item in items:
        if item.labels_path.exists() and not get_table_path(item.labels_path).exists():
            raise ValueError(
                f"{item.labels_path} exists, but without a table. Pass overwrite_labels=True to segment the stacks"
                " again, or choose another folder for the labels."
            )


def _check_names(items: list[FolderItem]) -> None:
    stacks: dict[Path, Path] = {}
    for item in items:
        if (other := stacks.setdefault(item.labels_path, item.path)) != item.path:
            raise ValueError(f"The labels of {other} and {item.path} would both be {item.labels_path}. Rename one.")


def _name_labels(path: Path, suffix: str) -> Path:
    endings = [ending for ending in (*STACK_SUFFIXES, ".zarr") if path.name.lower().endswith(ending)]
    stem = path.name[: len(path.name) - max(map(len, endings), default=0)]
    return path.with_name(f"{stem.removesuffix('.ome')}_labels{suffix}")
