"""The folder of jobs with its SQLite database: locked, opened, checked, and made again where somebody deletes it."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from service.core.errors import ConfigError, OutOfStorage, StackSegError, StorageUnavailable
from service.serving.storage.disk import translate_disk_faults

DATABASE = "jobs.sqlite3"
VERSION = 1
TABLE = """
CREATE TABLE jobs (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT,
  state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'cancelled', 'expired')),
  model TEXT NOT NULL,
  parameters TEXT NOT NULL,
  name TEXT NOT NULL,
  windows INTEGER NOT NULL,
  receive_seconds REAL NOT NULL,
  created REAL NOT NULL,
  started REAL,
  ended REAL,
  attempts INTEGER NOT NULL DEFAULT 0,
  input_bytes INTEGER NOT NULL,
  result_bytes INTEGER NOT NULL DEFAULT 0,
  outcome TEXT,
  failure TEXT
) STRICT
"""
INDEX = "CREATE INDEX jobs_by_state ON jobs (state, ended)"
# How long another program may hold the database before a call fails. All calls wait for that one meanwhile.
BUSY_SECONDS = 1.0
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
# Faults that pass: a full disk, and another program that holds the database.
PASSING_FAULTS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class JobDatabase:
    """The folder of jobs, its inner folders and its database. Safe to use from several threads of one process.

    lock   held by every call; whoever holds it sees no change by others
    Methods raise OutOfStorage and StorageUnavailable. Raises ConfigError for a folder or a database that cannot be
    used, and for a folder that another process holds.
    """

    def __init__(self, folder: Path, inner: Sequence[Path]) -> None:
        self._folder, self._inner = folder, inner
        self._path, self.lock = folder / DATABASE, threading.RLock()
        self._fault: str | None = None
        # Whether all rows are in a new file that could not be opened yet; the connection is closed then.
        self._copied = False
        try:
            self._folder_lock: int | None = self._make_folders()
        except BlockingIOError as error:
            raise ConfigError(f"jobs.folder: {folder}: is in use by another service; give each its own.") from error
        except OSError as error:
            raise ConfigError(f"jobs.folder: {folder} cannot be used: {error.strerror}.") from error
        try:
            self._connection = _open(self._path)
            self._inodes = self._find_inodes()
        except (OSError, sqlite3.Error) as error:
            self._unlock_folder()
            raise ConfigError(_explain(self._path, error)) from error
        except BaseException:
            self._unlock_folder()
            raise

    def close(self) -> None:
        """Write the log into the database, and let another process use the folder. May be called twice."""
        with self.lock:
            self._connection.close()
            self._unlock_folder()

    def query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of a statement that only reads."""
        with self.lock, self._faults():
            return self._connection.execute(statement, values).fetchall()

    def change(self, statement: str, *values: object) -> int:
        """Commit a statement to disk; return the number of rows that it has changed."""
        with self.lock:
            with self._faults(), self._connection:
                changed = self._connection.execute(statement, values).rowcount
            self._fault = None
        return changed

    def mend(self) -> str | None:
        """Make again what somebody has deleted; return what is wrong, in one sentence.

        The rows survive, since the deleted database is still open. What is in inner folders does not.
        """
        with self.lock:
            try:
                if all(inner.is_dir() for inner in self._inner) and self._in_place:
                    return self._check()
                # The descriptor of a deleted folder locks nothing any more.
                self._unlock_folder()
                self._folder_lock = self._make_folders()
                self._make_again()
            except PermissionError as error:
                return f"The folder of jobs cannot be used: {error.strerror}."
            except (StackSegError, OSError) as error:
                return f"The folder of jobs was deleted, and cannot be made again: {error}"
            return "The folder of jobs was deleted, and is made again; inputs and results in it are lost."

    def _make_folders(self) -> int:
        """Make the folders that do not exist; return an open descriptor that locks the outer one. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The operator may have made the folder itself, and left it open to others.
            for inner in self._inner:
                inner.mkdir(mode=0o700, exist_ok=True)
                inner.chmod(0o700)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _unlock_folder(self) -> None:
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    @property
    def _in_place(self) -> bool:
        """Whether the files are still those that were opened, under their names."""
        try:
            return self._find_inodes() == self._inodes
        except StorageUnavailable:
            return False

    def _check(self) -> str | None:
        """Return why the database cannot be used, in one sentence; None while it can."""
        if self._fault is not None:
            with suppress(OutOfStorage, StorageUnavailable):
                with self.lock, self._faults():
                    _check_pages(self._connection)
                self.change(f"PRAGMA user_version = {VERSION}")
        return self._fault

    def _make_again(self) -> None:
        """Write all rows into a new file: the connection still reads the deleted one.

        Raises StorageUnavailable if another database has its name.
        """
        copy = self._path.with_name(f".{DATABASE}.part")
        with self.lock, self._faults():
            if not self._copied:
                self._copy_rows(copy)
                # Closing deletes the log by its name, so that it comes before the new one is made.
                self._copied = True
                self._connection.close()
            if copy.exists():
                copy.replace(self._path)
            self._connection = _open(self._path)
            self._inodes, self._copied = self._find_inodes(), False

    def _copy_rows(self, copy: Path) -> None:
        if self._path.exists() and self._path.stat().st_ino != self._inodes[0]:
            raise StorageUnavailable("another database has its name; start the service again to use that one.")
        copy.unlink(missing_ok=True)
        copy.touch(0o600)
        with closing(sqlite3.connect(copy)) as target:
            self._connection.backup(target)

    def _find_inodes(self) -> list[int]:
        with translate_disk_faults():
            return [self._path.with_name(f"{DATABASE}{suffix}").stat().st_ino for suffix in ("", "-wal")]

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise OutOfStorage for a full disk, and StorageUnavailable for other faults of the disk or the database."""
        try:
            with translate_disk_faults():
                yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in PASSING_FAULTS:
                self._fault = f"The database of jobs cannot be used: {error}."
            if code == sqlite3.SQLITE_FULL:
                raise OutOfStorage("The disk that holds the jobs is full; try again later.") from error
            raise StorageUnavailable(f"The database of jobs cannot be used now: {error}; try again later.") from error


def _open(path: Path) -> sqlite3.Connection:
    path.touch(0o600)
    path.chmod(0o600)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=BUSY_SECONDS)
    try:
        _create_tables(connection, path)
        _check_pages(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            if any((path.parent / "jobs").iterdir()):
                raise ConfigError(
                    f"jobs.folder: {path.parent} holds files of jobs, and their database is gone; put it back, or move"
                    " the folder away to begin without jobs."
                )
            connection.execute(TABLE)
            connection.execute(INDEX)
            connection.execute(f"PRAGMA user_version = {VERSION}")
    if version not in {0, VERSION}:
        raise ConfigError(f"jobs.folder: {path} was written by another version of StackSeg; choose another folder.")


def _check_pages(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.Error for a database that is damaged, or has no table of jobs."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found.splitlines()[-1])
    connection.execute("SELECT number FROM jobs LIMIT 1")


def _explain(path: Path, error: Exception) -> str:
    """Return the message for a database that cannot be opened."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    damaged = isinstance(error, sqlite3.Error) and code in DAMAGE
    advice = (
        "Move the folder away to begin without jobs, or rescue what the database holds, as docs/running.md says under "
        '"Damaged database".'
    )
    return f"jobs.folder: {path} cannot be used: {error}. {advice if damaged else ''}".rstrip()
