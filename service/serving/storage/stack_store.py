"""Stored stacks: uploads that are retained for a limited time, so that they can be viewed and segmented again."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from service.core.errors import OutOfStorage, UnknownStack
from service.serving.storage.disk import ExpiryClock, RecordCache, translate_disk_errors

# Disk space of a stack in addition to its file: its folder, its record, and the unused part of the last block.
ENTRY_BYTES = 2**14
# Maximum number of stacks of one owner. A new stack evicts the least recently used ones.
MAX_STACKS_PER_OWNER = 1000
STACK_FILE = "upload.tif"
RECORD_FILE = "stack.json"


@dataclass(frozen=True)
class StoredStack:
    """A stack on disk.

    path       path of the file; the name of its folder is the stack's ID
    name       name of the uploaded file
    digest     digest of the file content
    nbytes     size of the file
    last_used  time of the last access, in seconds since the Unix epoch
    """

    path: Path
    name: str
    owner: str | None
    digest: str
    nbytes: int
    last_used: float

    @property
    def id(self) -> str:
        """The ID by which requests refer to the stack."""
        return self.path.parent.name


class StackStore:
    """A folder with a subfolder for each stack. Thread-safe within one process.

    Args:
        folder: path on the same file system as the jobs; the folder is created when the first stack is added
        quota_bytes: maximum size of all stacks; a new stack evicts the least recently used stacks of the owner who uses
            the most space
        keep_seconds: time for which a stack is retained after its last use
        entry_bytes: disk space that every stack uses in addition to its file
        max_stacks: maximum number of stacks of one owner

    deletion_callbacks  functions that are called with the ID of a stack after its file has been deleted

    Methods raise OutOfStorage if the disk is full, and StorageUnavailable for other disk errors.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quota_bytes: int,
        keep_seconds: float,
        entry_bytes: int = ENTRY_BYTES,
        max_stacks: int = MAX_STACKS_PER_OWNER,
    ) -> None:
        self._folder, self._quota_bytes, self._keep_seconds = folder, quota_bytes, keep_seconds
        self._entry_bytes, self._max_stacks = entry_bytes, max_stacks
        self._clock = ExpiryClock()
        self._records = RecordCache(folder, RECORD_FILE, self._read_stack)
        # Held from checking the quota until the new stack is stored.
        self._lock = threading.Lock()
        self.deletion_callbacks: list[Callable[[str], object]] = []

    def add(self, upload: Path, name: str, owner: str | None, digest: str) -> StoredStack:
        """Store a complete file together with its folder. Raises OutOfStorage if the quota would be exceeded."""
        self._clock.read_time()
        with translate_disk_errors(), self._lock:
            size = upload.stat().st_size
            stack = StoredStack(self._folder / upload.parent.name / STACK_FILE, name, owner, digest, size, 0.0)
            self._free_space(stack)
            content = {key: value for key, value in asdict(stack).items() if key not in {"path", "last_used"}}
            (upload.parent / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")
            upload.rename(upload.parent / STACK_FILE)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            upload.parent.rename(stack.path.parent)
        return stack

    def find(self, stack_id: str, owner: str | None) -> StoredStack:
        """Return a stack of this owner and extend its retention. Raises UnknownStack if there is none."""
        stack = self._read_stack(self._folder / stack_id)
        if stack is None or stack.owner != owner:
            raise UnknownStack(
                "There is no such stack: the ID is wrong, or the stack has expired. Upload the stack again.",
                parameter="stack",
            )
        self._clock.read_time()
        with translate_disk_errors(), suppress(FileNotFoundError):
            (stack.path.parent / RECORD_FILE).touch()
        return stack

    def delete(self, stack_id: str, owner: str | None) -> None:
        """Delete a stack. Raises UnknownStack. Jobs on the stack are not affected."""
        self._delete_files(self.find(stack_id, owner))

    def clean_up(self) -> None:
        """Delete expired stacks, and the remaining files of partly deleted stacks."""
        limit = self._clock.compute_limit(self._keep_seconds)
        for stack in self._records.list():
            if stack.last_used < limit:
                self._delete_files(stack)
        for folder in self._list_folders():
            # The folder of a complete stack always has a record.
            if not (folder / RECORD_FILE).exists():
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        """Disk space of all stacks in bytes."""
        return sum(map(self._count_bytes, self._records.list()))

    def _count_bytes(self, stack: StoredStack) -> int:
        return stack.nbytes + self._entry_bytes

    def _count_bytes_of_owners(self, stacks: Iterable[StoredStack]) -> Counter[str | None]:
        used_bytes: Counter[str | None] = Counter()
        for stack in stacks:
            used_bytes[stack.owner] += self._count_bytes(stack)
        return used_bytes

    def _free_space(self, new_stack: StoredStack) -> None:
        """Delete older stacks to free space for a new stack. If this is impossible, raise OutOfStorage."""
        stacks = sorted(self._records.list(), key=lambda stack: stack.last_used)
        own_stacks = [stack for stack in stacks if stack.owner == new_stack.owner]
        evicted_stacks = own_stacks[: max(len(own_stacks) + 1 - self._max_stacks, 0)]
        stacks = [stack for stack in stacks if stack not in evicted_stacks]
        used_bytes = self._count_bytes_of_owners([*stacks, new_stack])
        while used_bytes.total() > self._quota_bytes:
            owner, _ = used_bytes.most_common(1)[0]
            oldest_stack = next((stack for stack in stacks if stack.owner == owner), None)
            if oldest_stack is None:
                raise OutOfStorage(
                    "The stack does not fit into the disk space for stored stacks. Submit the stack with POST /jobs."
                )
            stacks.remove(oldest_stack)
            used_bytes[owner] -= self._count_bytes(oldest_stack)
            evicted_stacks.append(oldest_stack)
        for stack in evicted_stacks:
            self._delete_files(stack)

    def _list_folders(self) -> list[Path]:
        with translate_disk_errors():
            return list(self._folder.iterdir()) if self._folder.is_dir() else []

    @staticmethod
    def _read_stack(folder: Path) -> StoredStack | None:
        """Return the stack in a folder, or None if the folder contains no stack or a damaged record."""
        record_path = folder / RECORD_FILE
        try:
            content = json.loads(record_path.read_text(encoding="utf-8"))
            return StoredStack(folder / STACK_FILE, **content, last_used=record_path.stat().st_mtime)
        except (OSError, ValueError, TypeError):
            return None

    def _delete_files(self, stack: StoredStack) -> None:
        with translate_disk_errors(), suppress(FileNotFoundError):
            shutil.rmtree(stack.path.parent)
        for callback in self.deletion_callbacks:
            callback(stack.id)
