"""The jobs folder and its SQLite database: locking, opening, integrity checks, and repair after deletion."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from service.core.errors import ConfigError, OutOfStorage, StackSegError, StorageUnavailable
from service.serving.storage.disk import translate_disk_errors

DATABASE_NAME = "jobs.sqlite3"
SCHEMA_VERSION = 1
CREATE_TABLE = """
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
CREATE_INDEX = "CREATE INDEX jobs_by_state ON jobs (state, ended)"
# Earlier versions of the service ignore these tables. A member is a job, an annotated stack or a model.
CREATE_PROJECT_TABLES = (
    """
CREATE TABLE IF NOT EXISTS projects (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT,
  name TEXT NOT NULL,
  notes TEXT NOT NULL,
  created REAL NOT NULL,
  changed REAL NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS project_members (
  project TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('job', 'annotation', 'model')),
  id TEXT NOT NULL,
  name TEXT NOT NULL,
  group_name TEXT NOT NULL,
  added REAL NOT NULL,
  PRIMARY KEY (project, kind, id)
) STRICT
""",
    "CREATE INDEX IF NOT EXISTS jobs_of_projects ON project_members (id) WHERE kind = 'job'",
    # The jobs that are not deleted automatically.
    "CREATE VIEW IF NOT EXISTS kept_jobs AS SELECT id FROM project_members WHERE kind = 'job'",
)
SELECT_JOBS = "SELECT *, id IN kept_jobs AS is_kept FROM jobs"
INSERT_JOB = (
    "INSERT INTO jobs (state, id, owner, model, parameters, name, windows, receive_seconds, created, input_bytes)"
    " VALUES ('waiting', ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# SQL template with placeholders for the assignments and the condition.
UPDATE_TEMPLATE = "UPDATE jobs SET {} WHERE id = ? AND {}"
# SQL template with a placeholder for the condition.
DELETE_TEMPLATE = "DELETE FROM jobs WHERE id = ? AND {}"
# SQL template, with a placeholder for states, that selects all except the newest jobs of each owner. Jobs in projects
# are not selected and do not count.
OLD_JOBS_TEMPLATE = (
    "SELECT id FROM ("
    "SELECT id, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY number DESC) AS place FROM jobs"
    " WHERE state IN ({}) AND id NOT IN kept_jobs"
    ") WHERE place > ?"
)
# Time for which a call waits for a lock held by another program. While a call waits, all other calls wait too.
LOCK_TIMEOUT_SECONDS = 1.0
# SQLite error codes that indicate a damaged database.
DAMAGE_ERROR_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
# SQLite error codes that require no repair: a full disk, and a database locked by another program.
TEMPORARY_ERROR_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class JobDatabase:
    """The jobs folder, its subfolders and its database. Thread-safe within one process.

    lock  held during every call; hold this lock to prevent changes by other threads

    Methods raise OutOfStorage and StorageUnavailable. The constructor raises ConfigError if the folder or the database
    cannot be used, or if another process has locked the folder.
    """

    def __init__(self, folder: Path, subfolders: Sequence[Path]) -> None:
        self._folder, self._subfolders = folder, subfolders
        self._path, self.lock = folder / DATABASE_NAME, threading.RLock()
        self._problem: str | None = None
        # Whether the rows were copied to a new file that has not been opened yet. In this case, the connection is
        # closed.
        self._has_copied_rows = False
        try:
            self._folder_lock_fd: int | None = self._make_folders()
        except BlockingIOError as error:
            raise ConfigError(f"jobs.folder: {folder} is in use by another service. Set a different folder.") from error
        except OSError as error:
            raise ConfigError(f"jobs.folder: {folder} cannot be used: {error.strerror}.") from error
        try:
            self._connection = _open_database(self._path)
            self._inodes = self._find_inodes()
        except (OSError, sqlite3.Error) as error:
            self._unlock_folder()
            raise ConfigError(_describe_open_error(self._path, error)) from error
        except BaseException:
            self._unlock_folder()
            raise

    def close(self) -> None:
        """Write the write-ahead log to the database and unlock the folder. Further calls have no effect."""
        with self.lock:
            self._connection.close()
            self._unlock_folder()

    def delete_job(self, job_id: str, condition: str, result_path: Path) -> None:
        """Delete the row of a job if it meets a condition.

        SQLite needs space to delete a row. If the disk is full, the result is deleted first. `JobStore.recover` expires
        a job whose result is lost, so this is safe if the process is killed between the two steps.
        """
        statement = DELETE_TEMPLATE.format(condition)
        with self.lock:
            try:
                self.execute(statement, job_id)
            except OutOfStorage:
                if not self.query(f"{SELECT_JOBS} WHERE id = ? AND {condition}", job_id):
                    raise
                with translate_disk_errors():
                    result_path.unlink(missing_ok=True)
                self.execute(statement, job_id)

    def query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        """Execute a read-only statement and return its rows."""
        with self.lock, self._translate_errors():
            return self._connection.execute(statement, values).fetchall()

    def execute(self, statement: str, *values: object) -> int:
        """Execute a statement, commit it to disk, and return the number of changed rows."""
        with self.transaction() as connection:
            return connection.execute(statement, values).rowcount

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit the statements that are executed in this context to disk, or none of them if it raises an error."""
        with self.lock:
            with self._translate_errors(), self._connection:
                yield self._connection
            self._problem = None

    def repair(self) -> str | None:
        """Recreate deleted folders and files. Return the current problem as one sentence, or None.

        The rows are preserved, because the deleted database is still open. The contents of subfolders are lost.
        """
        with self.lock:
            try:
                if all(subfolder.is_dir() for subfolder in self._subfolders) and self._has_same_inodes:
                    return self._check_database()
                # The file descriptor of a deleted folder does not lock the new folder.
                self._unlock_folder()
                self._folder_lock_fd = self._make_folders()
                self._recreate_database()
            except PermissionError as error:
                return f"The jobs folder cannot be used: {error.strerror}."
            except (StackSegError, OSError) as error:
                return f"The jobs folder was deleted and cannot be recreated: {error}"
            return "The jobs folder was deleted and has been recreated. Its inputs and results are lost."

    def _make_folders(self) -> int:
        """Create missing folders, lock the jobs folder and return its file descriptor. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The operator may have created the folders with permissions for other users.
            for subfolder in self._subfolders:
                subfolder.mkdir(mode=0o700, exist_ok=True)
                subfolder.chmod(0o700)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock_fd)
            raise
        return lock_fd

    def _unlock_folder(self) -> None:
        if self._folder_lock_fd is not None:
            os.close(self._folder_lock_fd)
            self._folder_lock_fd = None

    @property
    def _has_same_inodes(self) -> bool:
        """Whether the paths still refer to the files that were opened."""
        try:
            return self._find_inodes() == self._inodes
        except StorageUnavailable:
            return False

    def _check_database(self) -> str | None:
        """Return a sentence that explains why the database cannot be used, or None."""
        if self._problem is not None:
            with suppress(OutOfStorage, StorageUnavailable):
                with self.lock, self._translate_errors():
                    _check_integrity(self._connection)
                self.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return self._problem

    def _recreate_database(self) -> None:
        """Write all rows to a new file. The connection still reads the deleted file.

        Raises StorageUnavailable if a different database exists at the path.
        """
        copy_path = self._path.with_name(f".{DATABASE_NAME}.part")
        with self.lock, self._translate_errors():
            if not self._has_copied_rows:
                self._copy_rows(copy_path)
                # Closing the connection deletes the write-ahead log by its path, so close the connection before a new
                # log exists.
                self._has_copied_rows = True
                self._connection.close()
            if copy_path.exists():
                copy_path.replace(self._path)
            self._connection = _open_database(self._path)
            self._inodes, self._has_copied_rows = self._find_inodes(), False

    def _copy_rows(self, copy_path: Path) -> None:
        if self._path.exists() and self._path.stat().st_ino != self._inodes[0]:
            raise StorageUnavailable(
                "Another database exists at the path of the job database. Restart the service to use that database."
            )
        copy_path.unlink(missing_ok=True)
        copy_path.touch(0o600)
        with closing(sqlite3.connect(copy_path)) as target:
            self._connection.backup(target)

    def _find_inodes(self) -> list[int]:
        with translate_disk_errors():
            return [self._path.with_name(f"{DATABASE_NAME}{suffix}").stat().st_ino for suffix in ("", "-wal")]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of a full disk to OutOfStorage, and other disk and database errors to StorageUnavailable."""
        try:
            with translate_disk_errors():
                yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in TEMPORARY_ERROR_CODES:
                self._problem = f"The job database cannot be used: {error}."
            if code == sqlite3.SQLITE_FULL:
                raise OutOfStorage("The disk that contains the jobs is full. Try again later.") from error
            raise StorageUnavailable(
                f"The job database cannot be used at the moment: {error}. Try again later."
            ) from error


def _open_database(path: Path) -> sqlite3.Connection:
    path.touch(0o600)
    path.chmod(0o600)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=LOCK_TIMEOUT_SECONDS)
    try:
        _create_tables(connection, path)
        _check_integrity(connection)
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
                    f"jobs.folder: {path.parent} contains the files of jobs, but the database of these jobs is missing."
                    " Restore the database, or move the folder away to start without jobs."
                )
            connection.execute(CREATE_TABLE)
            connection.execute(CREATE_INDEX)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        if version in {0, SCHEMA_VERSION}:
            for statement in CREATE_PROJECT_TABLES:
                connection.execute(statement)
    if version not in {0, SCHEMA_VERSION}:
        raise ConfigError(
            f"jobs.folder: {path} was written by a different version of StackSeg. Set a different folder."
        )


def _check_integrity(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.Error if the database is damaged or has no jobs table."""
    (check_result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if check_result != "ok":
        raise sqlite3.DatabaseError(check_result.splitlines()[-1])
    connection.execute("SELECT number FROM jobs LIMIT 1")


def _describe_open_error(path: Path, error: Exception) -> str:
    """Return the error message for a database that cannot be opened."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    is_damaged = isinstance(error, sqlite3.Error) and code in DAMAGE_ERROR_CODES
    advice = (
        "Move the folder away to start without jobs, or recover the jobs as described in docs/operating.md, section "
        '"Damaged database".'
    )
    return f"jobs.folder: {path} cannot be used: {error}. {advice if is_damaged else ''}".rstrip()
