"""The SQLite database with the rows of jobs: opening and checking it, what its faults mean, making it again."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from service.core.errors import ConfigError, OutOfStorage, StorageUnavailable
from service.serving.jobs.record import INDEX, TABLE, JobRecord, decode_row
from service.serving.storage.disk import translate_disk_faults

DATABASE = "jobs.sqlite3"
VERSION = 1
# How long another program may hold the database before a call fails. All calls wait for that one meanwhile.
BUSY_SECONDS = 1.0
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
# Faults that pass: a full disk, and another program that holds the database.
PASSING_FAULTS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class JobDatabase:
    """The database in the folder of jobs. Safe to use from several threads.

    lock   held by every call; whoever holds it sees no change by others
    Methods raise OutOfStorage and StorageUnavailable. Raises ConfigError for a database that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self.lock = folder / DATABASE, threading.RLock()
        self._fault: str | None = None
        # Whether all rows are in a new file that could not be opened yet; the connection is closed then.
        self._copied = False
        try:
            self._connection = _open(self._path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(_explain(self._path, error)) from error
        self._inodes = self._find_inodes()

    def close(self) -> None:
        """Write the log into the database. May be called twice."""
        with self.lock:
            self._connection.close()

    def select(self, condition: str, *values: object) -> list[JobRecord]:
        """Return the jobs for which a condition holds."""
        return [decode_row(row) for row in self.query(f"SELECT * FROM jobs WHERE {condition}", *values)]  # noqa: S608

    def query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of a statement that only reads."""
        with self.lock, self._faults():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit to disk at the end."""
        with self.lock:
            with self._faults(), self._connection:
                yield self._connection
            self._fault = None

    @property
    def in_place(self) -> bool:
        """Whether the files are still those that were opened, under their names."""
        try:
            return self._find_inodes() == self._inodes
        except StorageUnavailable:
            return False

    def check(self) -> str | None:
        """Return why the database cannot be used, in one sentence; None while it can."""
        if self._fault is not None:
            with suppress(OutOfStorage, StorageUnavailable), self.transaction() as connection:
                connection.execute(f"PRAGMA user_version = {VERSION}")
                _check_pages(connection)
        return self._fault

    def make_again(self) -> None:
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
