"""Folders of stacks: which files are segmented, and where their labels are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stackseg_client.errors import ProblemError
from stackseg_client.results import MEDIA_TYPES, Result, SavePath

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


def plan_folder(folder: SavePath, labels_folder: SavePath, pattern: str, suffix: str) -> list[FolderItem]:
    """Return the stacks in a folder that match a glob pattern, and the files for their labels, in the order of names.

    Raises ValueError if no stacks are found, if the labels would be in the same folder, or if two stacks would have the
    same file for their labels.
    """
    source, target = Path(folder).expanduser(), Path(labels_folder).expanduser()
    if source.resolve() == target.resolve():
        raise ValueError(f"{target} contains the stacks. Choose another folder for the labels.")
    if suffix not in MEDIA_TYPES:
        raise ValueError(f"suffix={suffix!r} is not supported. Choose one of {', '.join(MEDIA_TYPES)}.")
    files = [path for path in sorted(source.glob(pattern)) if path.name.lower().endswith(STACK_SUFFIXES)]
    paths = [path for path in files if path.is_file() and target.resolve() not in path.resolve().parents]
    if not paths:
        raise ValueError(f"{source} has no stacks that match {pattern!r}.")
    items = [FolderItem(path, target / _name_labels(path.relative_to(source), suffix)) for path in paths]
    _check_names(items)
    return items


def _check_names(items: list[FolderItem]) -> None:
    stacks: dict[Path, Path] = {}
    for item in items:
        if (other := stacks.setdefault(item.labels_path, item.path)) != item.path:
            raise ValueError(f"The labels of {other} and {item.path} would both be {item.labels_path}. Rename one.")


def _name_labels(path: Path, suffix: str) -> Path:
    ending = max((ending for ending in STACK_SUFFIXES if path.name.lower().endswith(ending)), key=len)
    stem = path.name[: -len(ending)]
    return path.with_name(f"{stem.removesuffix('.ome')}_labels{suffix}")
