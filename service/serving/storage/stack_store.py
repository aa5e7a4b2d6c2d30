"""Uploaded stacks that are kept for a while, to be looked at and segmented more than once without another upload."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from service.core.errors import OutOfStorage, UnknownStack
from service.serving.storage.disk import translate_disk_faults

STACK, RECORD = "upload.tif", "stack.json"


@dataclass(frozen=True)
class StoredStack:
    """A stack on disk.

    path    of the file, in a folder whose name is the stack's id
    digest  of its bytes
    nbytes  of the file
    used    when it was last asked for, in seconds since 1970
    """

    path: Path
    name: str
    owner: str | None
    digest: str
    nbytes: int
    used: float

    @property
    def id(self) -> str:
        """The name under which requests find the stack."""
        return self.path.parent.name


class StackStore:
    """A folder with a folder for every stack. Safe to use from several threads of one process.

    Args:
        folder: made when it is needed, on the file system of the jobs
        quota_bytes: of all stacks; the least recently used one of the owner who has most makes room for a new one
        keep_seconds: how long a stack is kept after it was last used

    Methods raise OutOfStorage for a full disk and StorageUnavailable for other faults of it.
    """

    def __init__(self, folder: Path, *, quota_bytes: int, keep_seconds: float) -> None:
        self._folder, self._quota, self._keep = folder, quota_bytes, keep_seconds
        # Held while room is made and taken.
        self._lock = threading.Lock()

    def keep(self, upload: Path, name: str, owner: str | None, digest: str) -> StoredStack:
        """Keep a complete file, whose folder becomes that of the stack. Raises OutOfStorage beyond the quota."""
        with translate_disk_faults(), self._lock:
            size = upload.stat().st_size
            stack = StoredStack(self._folder / upload.parent.name / STACK, name, owner, digest, size, 0.0)
            self._make_room(stack)
            facts = {key: value for key, value in asdict(stack).items() if key not in {"path", "used"}}
            (upload.parent / RECORD).write_text(json.dumps(facts), encoding="utf-8")
            upload.rename(upload.parent / STACK)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            upload.parent.rename(stack.path.parent)
        return stack

    def find(self, stack: str, owner: str | None) -> StoredStack:
        """Return a stack of this owner, which is kept for longer then. Raises UnknownStack, for those of others too."""
        found = self._read(self._folder / stack)
        if found is None or found.owner != owner:
            raise UnknownStack(
                "There is no such stack: its id is wrong, or it was kept long enough. Upload it again.",
                parameter="stack",
            )
        with translate_disk_faults(), suppress(FileNotFoundError):
            (found.path.parent / RECORD).touch()
        return found

    def delete(self, stack: str, owner: str | None) -> None:
        """Delete a stack. Raises UnknownStack. Jobs that were made of it keep the file."""
        self._forget(self.find(stack, owner))

    def clean_up(self) -> None:
        """Delete the stacks that nobody has used for longer than they are kept, and what was half deleted."""
        for stack in self._list():
            if stack.used < time.time() - self._keep:
                self._forget(stack)
        for folder in self._folders():
            # A stack comes with its record.
            if not (folder / RECORD).exists():
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks."""
        return sum(stack.nbytes for stack in self._list())

    def _make_room(self, new: StoredStack) -> None:
        """Delete older stacks for a new one. Raises OutOfStorage, deleting nothing, where that would not suffice."""
        stacks = sorted(self._list(), key=lambda stack: stack.used)
        used: Counter[str | None] = Counter()
        for stack in [*stacks, new]:
            used[stack.owner] += stack.nbytes
        chosen: list[StoredStack] = []
        while used.total() > self._quota:
            owner, _ = used.most_common(1)[0]
            oldest = next((stack for stack in stacks if stack.owner == owner), None)
            if oldest is None:
                raise OutOfStorage("The stack is larger than the room that the operator allows for stacks; post a job.")
            stacks.remove(oldest)
            used[owner] -= oldest.nbytes
            chosen.append(oldest)
        for stack in chosen:
            self._forget(stack)

    def _list(self) -> list[StoredStack]:
        return [stack for folder in self._folders() if (stack := self._read(folder)) is not None]

    def _folders(self) -> list[Path]:
        with translate_disk_faults():
            return list(self._folder.iterdir()) if self._folder.is_dir() else []

    @staticmethod
    def _read(folder: Path) -> StoredStack | None:
        """Return the stack in a folder; None where there is none, or a record that is damaged."""
        record = folder / RECORD
        try:
            facts = json.loads(record.read_text(encoding="utf-8"))
            return StoredStack(folder / STACK, **facts, used=record.stat().st_mtime)
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def _forget(stack: StoredStack) -> None:
        with translate_disk_faults(), suppress(FileNotFoundError):
            shutil.rmtree(stack.path.parent)
